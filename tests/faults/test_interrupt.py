"""An error that another thread raises in the main one: at once, but not in the middle of an import."""

import importlib
import sys

import pytest

from shardwise.faults.interrupt import Interrupts


@pytest.fixture
def interrupts():
    out = Interrupts(lambda: RuntimeError("a peer failed"))
    out.install()
    yield out
    out.remove()


def test_the_main_thread_is_interrupted(interrupts):
    with pytest.raises(RuntimeError, match="a peer failed"):
        interrupts.send()


def test_an_import_is_not_interrupted(interrupts, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("send()\nlast = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.send", interrupts.send, raising=False)
    assert importlib.import_module("slow_module").last == 1
    del sys.modules["slow_module"]
    with pytest.raises(RuntimeError, match="a peer failed"):
        interrupts.send()
