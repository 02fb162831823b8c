"""torchtitan's Llama 3 debug model in its DTensor modes, unmodified, under `install`: equal to one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from tests.drop_in.client import Run, prepared

HERE = "tests.drop_in.torchtitan_runs"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.environ.get("SHARDWISE_DEEP") != "1", reason="takes a minute: make clients"),
    pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed: make clients"),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with prepared("tests.drop_in.installed_torchtitan") as run:
        yield run


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (4, {"tp": 2}),
        (4, {"tp": 2, "sequence_parallel": False}),
        (4, {"tp": 1, "replicate": 2}),
        (2, {"tp": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_training_equals_one_device(run: Run, backend: str, world: int, how: dict[str, Any]):
    for found in run(f"{HERE}:train", world=world, backend=backend, **how):
        assert found["split"] == found["parameters in all"]
        assert max(found[kind] for kind in ("loss", "norm", "parameters")) < 1e-9
