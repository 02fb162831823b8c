"""Applying `fully_shard` to a model of transformers by its FSDP plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.fsdp import DataParallelMeshDims, fully_shard

__all__ = ["fsdp_plan", "shard_by_plan"]

_RESHARD = {"free_full_weight": True, "keep_full_weight": False}


def fsdp_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """The plan of the model: that of its configuration, beneath the prefix of the base model, and that of its class."""
    inner = dict(getattr(model.config, "base_model_fsdp_plan", None) or {})
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    return {f"{prefix}{name}": how for name, how in inner.items()} | dict(
        getattr(model, "_fsdp_plan", None) or {}
    )


def shard_by_plan(model: PreTrainedModel, mesh: Any) -> None:
    """Make a group of each module that the plan names, or of each block if it names none, and of the rest, over axis "dp"."""
    plan, found = fsdp_plan(model), {}
    for name, module in model.named_modules():
        how = next((how for pattern, how in plan.items() if _matches(pattern, name)), None)
        if how is not None:
            found[name] = module, _RESHARD[how]
    if not found:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        found = {str(i): (block, True) for i, block in enumerate(b for some in lists for b in some)}
    dims = DataParallelMeshDims(shard="dp")
    for module, reshard in reversed(found.values()):  # the innermost modules first
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def _matches(pattern: str, name: str) -> bool:
    """Whether a name has the parts of a pattern; a star stands for one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted))
