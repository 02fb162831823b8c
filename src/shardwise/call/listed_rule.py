"""A user's list of placements, asked for and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Shard, Spec
from shardwise.rules import Call, Candidate, Listed, Listing
from shardwise.tensor.dtensor import DTensor

__all__ = ["listed"]


def listed(
    row: Listing, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh
) -> Listed:
    """What a user's function lists for a call, of whose tensors it sees the specs."""

    def known(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value._spec
        if isinstance(value, Tensor):
            layout = Layout.replicated(value.shape, axes_of(mesh))
            return Spec(mesh, layout, value.dtype, torch.Size(value.shape), tuple(value.stride()))
        return type(value)(map(known, value)) if isinstance(value, list | tuple) else value

    said = row.candidates(*map(known, args), **{k: known(v) for k, v in kwargs.items()})
    return Listed(tuple(_candidate(row, call, pair) for pair in said))


def _candidate(row: Listing, call: Call, pair: Any) -> Candidate:
    if not (
        isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(p, list | tuple) for p in pair)
    ):
        raise LayoutError(
            f"{row.text} listed {pair!r} for {call.op}.",
            why="a candidate is a pair: the placements of the outputs, and those of the inputs",
            fix="return [([Shard(0)], [Shard(0), None]), …]",
        )
    outputs, inputs = pair
    return Candidate(
        _placements(row, call, outputs, call.outputs, "outputs"),
        _placements(row, call, inputs, call.shapes, "inputs"),
    )


def _placements(
    row: Listing, call: Call, said: Sequence[Any], shapes: Sequence[tuple[int, ...]], which: str
) -> tuple[Placement, ...]:
    """The placements of a candidate without what stands for arguments that are no tensors."""
    found = [p for p in said if p is not None]
    wrong = [p for p in found if not isinstance(p, Shard | Replicate | Partial)]
    if wrong or len(found) != len(shapes):
        raise LayoutError(
            f"{row.text} listed {list(said)!r} for the {which} of {call.op}.",
            why=f"{wrong[0]!r} of {type(wrong[0]).__module__} is not a placement of shardwise"
            if wrong
            else f"the call has {len(shapes)} tensors there, of shapes {list(shapes)}",
            fix="one placement for each tensor, and None for what is none",
        )
    out: list[Placement] = []
    for p, shape in zip(found, shapes, strict=True):
        if isinstance(p, Shard) and not -len(shape) <= p.dim < len(shape):
            raise LayoutError(
                f"{row.text} listed {p!r} among the {which} of {call.op}.",
                why=f"that tensor has shape {shape}",
                fix=f"use a dim in {-len(shape)}..{len(shape) - 1}" if shape else "use Replicate()",
            )
        out.append(Shard(p.dim % len(shape)) if isinstance(p, Shard) else p)
    return tuple(out)
