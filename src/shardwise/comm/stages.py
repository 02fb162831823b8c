"""Steps of plans as functions, for programs that run them by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.grouped_recipe import grouped_recipe_for
from shardwise.comm.ledger import Sent
from shardwise.comm.mesh import Coord
from shardwise.comm.recipe import recipe_for
from shardwise.comm.run import all_ranks_stage, entry_of, real_stage
from shardwise.comm.run_many import all_ranks_stage as all_ranks_grouped_stage
from shardwise.comm.run_many import entry_of as grouped_entry_of
from shardwise.comm.run_many import real_stage as real_grouped_stage
from shardwise.layout import block_shape
from shardwise.plan import GroupedStep, Step

__all__ = [
    "grouped_entry",
    "grouped_stage",
    "simulated_grouped_stage",
    "simulated_stage",
    "single_entry",
    "single_stage",
]


def single_stage(
    step: Step, mesh: DeviceMesh, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """A function that starts a step on this rank, and one that completes it, given the first one's result and the block."""
    return real_stage(step, mesh, dtype)


def grouped_stage(
    step: GroupedStep, mesh: DeviceMesh, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor, Any], list[Tensor]]]:
    """The same for a step of a grouped plan, on a list of blocks."""
    return real_grouped_stage(step, mesh, list(dtypes))


def simulated_stage(
    step: Step, mesh: DeviceMesh, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """The same as `single_stage` for all ranks of a simulation."""
    return all_ranks_stage(step, mesh, dtype)


def simulated_grouped_stage(
    step: GroupedStep, mesh: DeviceMesh, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor, Any], list[Tensor]]]:
    """The same as `grouped_stage` for all ranks of a simulation."""
    return all_ranks_grouped_stage(step, mesh, list(dtypes))


def single_entry(step: Step, coord: Coord, dtype: torch.dtype) -> Sent:
    """What the rank at a coord sends in a step that communicates."""
    recipe = recipe_for(step, coord, dtype)
    wire = recipe.codec.encode(
        recipe.pack(torch.empty(block_shape(step.source, coord), dtype=dtype, device="meta"))
    )
    return entry_of(step, recipe, wire)


def grouped_entry(step: GroupedStep, coord: Coord, dtypes: Sequence[torch.dtype]) -> Sent:
    """The same for a step of a grouped plan."""
    recipe = grouped_recipe_for(step, coord, list(dtypes))
    shapes = [block_shape(m.step.source, coord) for m in step.members]
    blocks = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
    return grouped_entry_of(step, recipe, recipe.codec.encode(recipe.pack(blocks)))
