"""torch's own `fully_shard`, `replicate`, pipelining, checkpoints and state dicts run on our tensor under `install`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.drop_in.client import Run, prepared

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
HERE = "tests.drop_in.torch_runs"
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with prepared("tests.drop_in.installed_torch") as run:
        yield run


def _wrong(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: value for result in results for name, value in result.items() if not value <= 1e-12}


@pytest.mark.parametrize("world", [2, 4] if DEEP else [4])
def test_modules_train_as_on_one_device(run: Run, world: int):
    results = run(f"{HERE}:modules", world=world)
    assert len(results[0]) == (11 if world == 4 else 8)
    assert _wrong(results) == {}


@pytest.mark.parametrize("world", [2, 4] if DEEP else [4])
def test_state_dicts_with_every_option(run: Run, world: int):
    assert _wrong(run(f"{HERE}:state_dicts", world=world)) == {}


@pytest.mark.parametrize("world", [2, 4] if DEEP else [4])
def test_pipelines_of_tensor_parallel_stages(run: Run, world: int):
    assert max(run(f"{HERE}:pipeline", world=world)) <= 1e-12


def test_torch_treats_our_tensor_as_its_own(run: Run):
    assert run(f"{HERE}:tensors", world=2) == [[], []]
