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
    for d, axes in shard_order:
        if list(axes) == sorted(axes):
            continue
        for order, axis in enumerate(axes):
            if isinstance(p := out[axis], Shard) and p.dim == d:
                out[axis] = Shard(d, order)
    return tuple(out)


@dataclass
class _Fields:
    """What `dataclasses.replace` may replace in a spec."""

    mesh: Any
    placements: Any
    tensor_meta: Any


Spec.of_placements = staticmethod(placed_spec)
Spec.__dataclass_fields__ = _Fields.__dataclass_fields__  # type: ignore[attr-defined]
Spec.__dataclass_params__ = _Fields.__dataclass_params__  # type: ignore[attr-defined]
