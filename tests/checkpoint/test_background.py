"""Saves in the background, and the manager of a run's checkpoints."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.aside import aside_path


def mesh_of(n):
    return sw.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


@pytest.fixture
def held(monkeypatch):
    """Writes wait until `held.set()`."""
    release, write = threading.Event(), os.write

    def slow(descriptor, data):
        release.wait(20)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    yield release
    release.set()


def test_the_program_may_change_what_is_being_saved(tmp_path, held):
    with sw.simulate(2):
        x = sw.distribute_tensor(torch.ones(5), mesh_of(2), [sw.Shard(0)])
        values = {"step": 1}
        handle = checkpoint.async_save({"x": x, "v": values}, tmp_path / "c")
        x.mul_(2)
        values["step"] = 2
        assert not handle.done()
        assert checkpoint.latest(tmp_path) is None
    held.set()
    handle.wait()
    assert handle.done()
    found = checkpoint.load(tmp_path / "c")
    assert found["v"] == {"step": 1}
    assert torch.equal(found["x"], torch.ones(5))


def full_disk(descriptor, data):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["save", "async_save", "load", "manager", "wait"])
def test_a_failed_write_is_raised_by_the_next_call(tmp_path, monkeypatch, call):
    checkpoint.save({"x": torch.ones(3)}, tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        handle = checkpoint.async_save({"x": torch.zeros(3)}, tmp_path / "c")
        while not handle.done():
            pass
    calls = {
        "save": lambda: checkpoint.save({}, tmp_path / "d"),
        "async_save": lambda: checkpoint.async_save({}, tmp_path / "d"),
        "load": lambda: checkpoint.load(tmp_path / "c"),
        "manager": lambda: checkpoint.CheckpointManager(tmp_path / "run").save({}, 1),
        "wait": handle.wait,
    }
    with pytest.raises(checkpoint.CheckpointWriteError, match="No space left"):
        calls[call]()
    assert torch.equal(checkpoint.load(tmp_path / "c")["x"], torch.ones(3))  # and not by the one after it
    assert not (tmp_path / "d").exists()


PROGRAM = """
    import os, sys, torch
    from shardwise import checkpoint
    def full(descriptor, data):
        raise OSError(28, "No space left on device")
    os.write = full
    checkpoint.async_save({"x": torch.ones(3)}, sys.argv[1])
"""


def test_a_program_whose_last_write_fails_does_not_end_well(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "CheckpointWriteError" in done.stderr


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def save_last(path, rank_without_room):
    x = sw.ones(8, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    if dist.get_rank() == rank_without_room:
        os.fsync = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    checkpoint.async_save({"x": x}, path)


@pytest.mark.processes
def test_launch_waits_for_the_last_write_and_raises_what_it_raised(tmp_path):
    with pytest.raises(sw.LaunchError, match=r"\[rank 1\] The checkpoint .* was not written: No space left"):
        sw.launch(save_last, 2, tmp_path / "none", 1)
    assert list(tmp_path.iterdir()) == []
    sw.launch(save_last, 2, tmp_path / "there", None)
    assert checkpoint.load(tmp_path / "there")["x"].tolist() == [1.0] * 8


def test_a_hundred_saves_leave_no_memory_behind(tmp_path):
    x = torch.ones(1 << 19)  # 2 MB
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = memory / f"shardwise-test-{os.getpid()}"
    try:
        with checkpoint.CheckpointManager(path, keep=1) as manager:
            for step in range(100):
                manager.save({"x": x, "step": step}, step)
                if step == 10:
                    manager.wait()
                    gc.collect()
                    before = resident()
        gc.collect()
        assert resident() - before < 8 << 20
        for _ in range(2):
            checkpoint.async_save(
                {"x": torch.ones(1 << 23)}, path / "large"
            ).wait()  # 32 MB, kept for the next one
        kept = resident()
        checkpoint.release_memory()
        assert kept - resident() > 30 << 20
        assert len(os.listdir("/proc/self/fd")) < 200
    finally:
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()


def test_the_manager_keeps_the_newest_and_removes_what_was_left_behind(tmp_path):
    manager = checkpoint.CheckpointManager(tmp_path, keep=2, every=2)
    assert manager.load({"n": 0}) is None
    aside_path(tmp_path / "step-00000099", "0-0").mkdir()
    for step in range(1, 8):
        assert manager.save_if_due({"n": step}, step) == (step % 2 == 0)
    manager.wait()
    assert [p.name for p in manager.checkpoints()] == ["step-00000004", "step-00000006"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    into = {"n": 0}
    assert manager.load(into) == 6
    assert into == {"n": 6}
    (tmp_path / "step-00000006" / "checkpoint.json").write_bytes(b"{}")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="step-00000004"):
        manager.load(into)
    with pytest.raises(checkpoint.CheckpointError, match="keep=0"):
        checkpoint.CheckpointManager(tmp_path, keep=0)


def save_here(path, what):
    """Save in the background on real ranks; rank 1 fails in one of several ways."""
    rank = torch.distributed.get_rank()
    x = sw.distribute_tensor(torch.arange(8.0), mesh_of(4), [sw.Shard(0)])
    manager = checkpoint.CheckpointManager(path, keep=1)
    manager.save({"x": x}, 1)
    manager.wait()
    write, errors = os.write, []
    if what == "disk" and rank == 1:
        os.write = full_disk
    try:
        state = {"x": x + 1, "f": object()} if what == "value" and rank == 1 else {"x": x + 1}
        for call in (lambda: manager.save(state, 2), manager.wait):
            try:
                call()
            except checkpoint.CheckpointError as error:
                errors.append(str(error))
    finally:
        os.write = write
    into = {"x": torch.zeros_like(x)}
    step = manager.load(into)
    assert torch.equal(into["x"].to_local(), x.to_local() + (0 if what else 1))
    return step, errors


@pytest.mark.processes
def test_on_processes(workers, tmp_path):
    assert workers.run(save_here, tmp_path / "a", "") == [(2, [])] * 4
    for what, text in (("disk", "No space left"), ("value", "cannot be saved")):
        found = workers.run(save_here, tmp_path / what, what)
        assert [step for step, _ in found] == [1] * 4
        assert len({tuple(errors) for _, errors in found}) == 1
        assert "[rank 1]" in found[0][1][0]
        assert text in found[0][1][0]
