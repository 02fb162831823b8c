"""transformers' own parallel paths, accelerate and peft, unmodified, under `install`: equal to one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from tests.drop_in.client import Run, prepared

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
HERE = "tests.drop_in.transformers_runs"
KINDS = ("norm", "loss", "parameters", "saved", "merged", "merged loss")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed"),
]
CASES = [
    ("Qwen3", "tp", 2),
    *(
        [
            *(
                (name, "tp", 2)
                for name in ("Llama", "Gemma 3", "Phi-3", "Mixtral", "Qwen3-MoE", "DeepSeek-V3")
            ),
            ("Llama", "fsdp", 2),
            ("Llama", "fsdp x tp", 4),
            ("Mixtral", "fsdp x tp", 4),
            ("Mixtral", "ep", 2),
            ("Mixtral", "fsdp x ep", 4),
            ("Mixtral", "fsdp x ep, dispatched", 2),
            ("Mixtral", "fsdp x ep, dispatched", 4),
        ]
        if DEEP
        else []
    ),
]
UNEVEN = [("Llama", 2), ("Phi-3", 2), ("Mixtral", 2)] if DEEP else []


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with prepared("tests.drop_in.installed_transformers") as run:
        yield run


def _worst(found: dict[str, Any]) -> float:
    return max(found[kind] for kind in KINDS if kind in found)


@pytest.mark.parametrize(("name", "mode", "world"), CASES)
def test_training_generation_and_saving_equal_one_device(run: Run, name: str, mode: str, world: int):
    for found in run(f"{HERE}:train", world=world, name=name, mode=mode):
        assert found["split"] >= 10
        assert found["gradients"] == {}
        assert found["generates alike"]
        assert _worst(found) < 1e-9


@pytest.mark.parametrize(
    ("name", "mode"), [("Mixtral", "tp"), *([("Qwen3", "tp"), ("Mixtral", "ep")] if DEEP else [])]
)
def test_copies_compute_with_their_own_parameters(run: Run, name: str, mode: str):
    for found in run(f"{HERE}:copied", world=2, name=name, mode=mode):
        assert found["loss"] < 1e-9
        assert found["gradients"] == {}
        assert found["gradients of the original"] == {}


@pytest.mark.parametrize(("name", "world"), UNEVEN)
def test_widths_that_ranks_do_not_divide(run: Run, name: str, world: int):
    uneven = {"intermediate_size": 33, "vocab_size": 65}
    for found in run(f"{HERE}:train", world=world, name=name, mode="tp", **uneven):
        assert found["gradients"] == {}
        assert found["generates alike"]
        assert _worst(found) < 1e-9


@pytest.mark.parametrize(
    ("name", "mode", "ranks"),
    [case for case in CASES if case[1] in ("tp", "fsdp", "fsdp x tp")]
    + ([] if DEEP else [("Llama", "fsdp x tp", 4)]),
)
def test_the_same_script_with_all_ranks_in_one_process(run: Run, name: str, mode: str, ranks: int):
    (found,) = run(f"{HERE}:simulate", ranks=ranks, name=name, mode=mode)
    assert found["split"] >= 10
    assert found["gradients"] == {}
    assert found["generates alike"]
    assert _worst(found) < 1e-9


def test_what_a_simulation_cannot_run_is_refused(run: Run):
    (errors,) = run(f"{HERE}:not_simulated")
    dispatch = (
        "transformers.distributed.expert_parallel.EpDispatchExpertsParallel.transform_inputs_pre_forward"
    )
    text = f"{dispatch} was called in a simulation."
    assert errors == {"ep": text, "fsdp x ep, dispatched": text}


ACCELERATED = [("fsdp", 2), *([("hsdp", 4), ("tp", 2), ("fsdp x tp", 4)] if DEEP else [])]


@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize(("mode", "world"), ACCELERATED)
def test_accelerate_trains_as_on_one_device(run: Run, mode: str, world: int):
    for found in run("tests.drop_in.accelerate_runs:train", world=world, mode=mode):
        assert found["split"] >= 10
        assert found["gradients"] == {}
        assert _worst(found) < 1e-9


TARGETS = [
    ["q_proj", "o_proj", "embed_tokens"],
    *([["q_proj", "up_proj"], ["o_proj", "down_proj"]] if DEEP else []),
]


@pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
@pytest.mark.parametrize("targets", TARGETS, ids=" ".join)
def test_peft_trains_and_merges_adapters_as_on_one_device(run: Run, targets: list[str]):
    trained = ["lm_head"]  # a copy of the layer, beside the adapters
    for found in run("tests.drop_in.peft_runs:train", world=2, targets=targets, modules=trained):
        assert found["split"] >= 4
        assert found["gradients"] == {}
        assert _worst(found) < 1e-9


def test_compiled_functions(run: Run):  # here, because transformers has imported what compiling needs
    for found in run("tests.drop_in.torch_runs:compiled", world=2 if DEEP else 1):
        assert max(found.values()) < 1e-12
