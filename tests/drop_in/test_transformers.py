"""transformers' own tensor, expert and data parallel paths, unmodified, under `install`: equal to one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from tests.drop_in.client import Run, prepared

DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
HERE = "tests.drop_in.transformers_runs"
GRAD_HOOKS = ("Qwen3", "Gemma 3", "Qwen3-MoE")
"""Families whose norms transformers reduces in a hook, which is right for one micro-batch per step only."""
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed"),
]
CASES = [
    ("Llama", "tp", 2),
    *(
        [
            *((name, "tp", 2) for name in (*GRAD_HOOKS, "Phi-3", "Mixtral", "DeepSeek-V3")),
            ("Llama", "tp", 4),
            ("Llama", "fsdp", 2),
            ("Llama", "fsdp x tp", 4),
            ("Mixtral", "fsdp x tp", 4),
            ("Mixtral", "ep", 2),
        ]
        if DEEP
        else []
    ),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with prepared("tests.drop_in.installed_transformers") as run:
        yield run


@pytest.mark.parametrize(("name", "mode", "world"), CASES)
def test_training_generation_and_saving_equal_one_device(run: Run, name: str, mode: str, world: int):
    micro = 1 if name in GRAD_HOOKS else 2
    for found in run(f"{HERE}:train", world=world, name=name, mode=mode, micro=micro):
        assert found["split"] >= 10
        assert found["gradients"] == {}
        assert found["generates alike"]
        assert max(found[kind] for kind in ("norm", "loss", "parameters", "saved")) < 1e-9
