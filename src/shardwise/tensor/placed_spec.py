"""Specs from meshes and placements, as torch's `DTensorSpec` is constructed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.layout import (
    Layout,
    LayoutError,
    Placement,
    Shard,
    ShardOrderEntry,
    Spec,
    TensorMeta,
    contiguous_stride,
    unit_placements,
)

__all__ = ["placed_spec"]


def placed_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    tensor_meta: TensorMeta | None,
    shard_order: Sequence[ShardOrderEntry] | None = None,
) -> Spec:
    """The spec of a tensor with this metadata and one placement per axis."""
    if tensor_meta is None:
        raise LayoutError(
            "DTensorSpec got no tensor_meta.",
            why="How an axis splits a tensor depends on the tensor's shape.",
            fix="DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))",
        )
    shape, stride, dtype = tensor_meta
    placements = _ordered(placements, shard_order or ())
    layout = Layout.of(shape, axes_of(mesh), placements)
    strides = contiguous_stride(shape) if stride is None else tuple(stride)
    return Spec(mesh, layout, dtype, torch.Size(shape), strides, unit_placements(layout, placements))


def _ordered(
    placements: Sequence[Placement], shard_order: Sequence[ShardOrderEntry]
) -> tuple[Placement, ...]:
    """The placements, with the order of the axes on each dim that has one."""
    out = list(placements)
    _check_order(placements, shard_order)
    for d, axes in shard_order:
        if list(axes) == sorted(axes):
            continue
        for order, axis in enumerate(axes):
            if isinstance(p := out[axis], Shard) and p.dim == d:
                out[axis] = Shard(d, order)
    return tuple(out)


def _check_order(placements: Sequence[Placement], shard_order: Sequence[ShardOrderEntry]) -> None:
    """Raise unless the order names, for each dim that axes split, those axes."""
    given = f"shard_order {tuple(map(tuple, shard_order))}"
    wrong = [f"{given} has empty mesh dim." for _, axes in shard_order if not axes]
    wrong += [f"{given} has invalid tensor dim {d}." for d, _ in shard_order if d < 0]
    wrong += [
        f"{given} has invalid mesh dim {_tuple_text(axes)}."
        for _, axes in shard_order
        if any(not 0 <= a < len(placements) for a in axes)
    ]
    dims = [d for d, _ in shard_order]
    if dims != sorted(set(dims)):
        wrong.append(f"tensor dim should be sorted in shard_order, and named once: {given}.")
    if not wrong:
        named = {(axis, d) for d, axes in shard_order for axis in axes}
        wrong = [
            f"placement[{axis}] doesn't have a matching shard in shard_order: {given} has it split dim {d}, but it is {placements[axis]}."
            for axis, d in sorted(named)
            if getattr(placements[axis], "dim", None) != d
        ]
    if wrong:
        raise OrderError(
            "\n  ".join(wrong),
            why="A shard_order has one entry for each dim that is split, in the order of dims, with the mesh axes that split it.",
            fix="shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),), for a dim that axis 1 splits outside of axis 0",
        )


def _tuple_text(axes: Sequence[int]) -> str:
    return f"({','.join(map(str, axes))},)"


# torch raises AssertionError
class OrderError(LayoutError, AssertionError):
    """The order of mesh axes on the dims of a tensor does not fit its placements."""


@dataclass
class _Fields:
    """What `dataclasses.replace` may replace in a spec."""

    mesh: Any
    placements: Any
    tensor_meta: Any


Spec.of_placements = staticmethod(placed_spec)
Spec.__dataclass_fields__ = _Fields.__dataclass_fields__  # type: ignore[attr-defined]
Spec.__dataclass_params__ = _Fields.__dataclass_params__  # type: ignore[attr-defined]
