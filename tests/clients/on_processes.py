"""Training tiny models on real processes; the processes import this module."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.clients.families import FAMILIES
from tests.clients.float64 import Float64
from tests.clients.training import difference, distribute_batch, train

import shardwise as sw
from shardwise.parallel import parallelize_module

__all__ = ["greatest_differences", "unequal_adapters"]


def greatest_differences(names: list[str], steps: int) -> dict[str, float]:
    """For each family the greatest difference from dense, on a mesh of all ranks: tp, or dp x tp if there are four."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    world = dist.get_world_size()
    shape, axes = ((world,), ("tp",)) if world < 4 else ((2, world // 2), ("dp", "tp"))
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    return {name: _difference(name, mesh, steps) for name in names}


def _difference(name: str, mesh: sw.DeviceMesh, steps: int) -> float:
    family = FAMILIES[name]
    with Float64():
        dense = train(family.model(), family.batches(), steps)
        # other weights on other ranks: those of rank 0 count
        model = family.model(seed=dist.get_rank())
        parallelize_module(model, mesh, family.plan_of(model))
        got = train(model, [distribute_batch(b, mesh) for b in family.batches()], steps)
        tokens = family.batches()[0].get("input_ids")
        if family.generates and tokens is not None:
            _generate_alike(model, tokens)
    return max(value for value, _ in difference(got, dense).worst.values())


def _generate_alike(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Generate some tokens, which must be the same on all ranks."""
    out = model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)  # type: ignore[operator]
    every = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(every, out.contiguous())
    if any(not torch.equal(out, other) for other in every):
        raise AssertionError("ranks generated different tokens")


def unequal_adapters() -> list[str]:
    """The errors for adapters that were initialised differently on the ranks: when they are merged, and in a forward pass."""
    family = FAMILIES["Llama"]
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(family.model(), mesh, family.plan_of(family.model()))
    torch.manual_seed(dist.get_rank())
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    errors = []
    for use in (adapted.merge_adapter, lambda: adapted(input_ids=family.batches()[0]["input_ids"])):
        try:
            use()
        except sw.PlainTensorError as error:
            errors.append(str(error))
    return errors
