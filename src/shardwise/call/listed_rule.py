"""Rules that a user's function lists as placements: calling the function, and checking what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors
from shardwise.call.op_call import OpCall
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Shard, Spec
from shardwise.rules import Call, Candidate, Listed, Listing
from shardwise.tensor.dtensor import DTensor

__all__ = ["listed_rule"]


def listed_rule(row: Listing, seen: Call, call: OpCall) -> Listed:
    """The candidates that a user's function lists for a call; it gets the spec of each tensor in its place."""

    def spec(t: Tensor) -> Spec:
        if isinstance(t, DTensor):
            return t._spec
        layout = Layout.replicated(t.shape, call.axes)
        return Spec(call.mesh, layout, t.dtype, torch.Size(t.shape), tuple(t.stride()))

    listed = row.candidates(*map_tensors(spec, call.args), **map_tensors(spec, call.kwargs))
    return Listed(tuple(_candidate(row, seen, pair) for pair in listed))


def _candidate(row: Listing, call: Call, pair: Any) -> Candidate:
    if not (
        isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(p, list | tuple) for p in pair)
    ):
        raise LayoutError(
            f"The rule {row.text} returned {pair!r} for {call.op}.",
            why="A candidate is a pair: the placements of the outputs, and those of the inputs.",
            fix="return [([Shard(0)], [Shard(0), None]), ...]",
        )
    outputs, inputs = pair
    return Candidate(
        _placements(row, call, outputs, call.outputs, "outputs"),
        _placements(row, call, inputs, call.shapes, "inputs"),
    )


def _placements(
    row: Listing, call: Call, listed: Sequence[Any], shapes: Sequence[tuple[int, ...]], which: str
) -> tuple[Placement, ...]:
    """The placements of a candidate, without the None that stands for arguments that are not tensors."""
    found = [p for p in listed if p is not None]
    wrong = [p for p in found if not isinstance(p, Shard | Replicate | Partial)]
    if wrong or len(found) != len(shapes):
        raise LayoutError(
            f"The rule {row.text} returned {list(listed)!r} for the {which} of {call.op}.",
            why=f"{wrong[0]!r} of {type(wrong[0]).__module__} is not a placement of shardwise."
            if wrong
            else f"The call has {len(shapes)} tensors there, of shapes {list(shapes)}.",
            fix="Return one placement for each tensor, and None for arguments that are not tensors.",
        )
    out: list[Placement] = []
    for p, shape in zip(found, shapes, strict=True):
        if isinstance(p, Shard) and not -len(shape) <= p.dim < len(shape):
            raise LayoutError(
                f"The rule {row.text} returned {p!r} among the {which} of {call.op}.",
                why=f"That tensor has shape {shape}.",
                fix=f"Use a dim in {-len(shape)}..{len(shape) - 1}." if shape else "Use Replicate().",
            )
        out.append(Shard(p.dim % len(shape)) if isinstance(p, Shard) else p)
    return tuple(out)
