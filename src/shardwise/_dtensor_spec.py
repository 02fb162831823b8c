"""Where torch keeps the spec of a DTensor; here it is `shardwise.layout.Spec`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise._reexports import reexports
from shardwise.layout import (
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardOrderEntry,
    Spec,
    SpecDraft,
    StridedShard,
    TensorMeta,
)
from shardwise.tensor.placed_spec import placed_spec

__all__ = ["DTensorSpec", "ShardOrder", "ShardOrderEntry", "TensorMeta"]

ShardOrder = tuple[ShardOrderEntry, ...]
"""The axes that split each dim, for the dims that axes split."""


class _SpecType(type):
    """`isinstance(x._spec, DTensorSpec)` is true of every spec."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Spec | SpecDraft)


class DTensorSpec(metaclass=_SpecType):
    """The spec of a tensor with these placements, constructed with torch's arguments.

    Args:
        mesh: the mesh.
        placements: one placement per mesh axis.
        tensor_meta: the global shape, strides and dtype.
        shard_order: for dims that axes split in another order than that of the mesh, the axes, outermost first.

    Raises:
        LayoutError: the placements do not fit, or `tensor_meta` is None.

    `dataclasses.replace` takes the same names.

    >>> import dataclasses, torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     spec = DTensorSpec(mesh, (sw.Shard(0),), TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32))
    ...     spec, dataclasses.replace(spec, placements=(sw.Replicate(),))
    (Spec(f32[4:tp, 3] on tp=2), Spec(f32[4, 3] on tp=2))
    """

    def __new__(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | None = None,
        shard_order: Sequence[ShardOrderEntry] | None = None,
        use_strided_shard_as_shard_order: bool | None = None,
    ) -> Any:
        return placed_spec(mesh, placements, tensor_meta, shard_order)

    @staticmethod
    def format_shard_order_str(
        placements: Sequence[Placement], shard_order: Sequence[ShardOrderEntry] | None = None
    ) -> str:
        """The placements as printed graphs show them; where several axes split a dim, each with its position among them.

        >>> import shardwise as sw
        >>> DTensorSpec.format_shard_order_str((sw.Shard(0), sw.Replicate()))
        'S(0)R'
        """
        positions = {
            axis: f"[{i}]"
            for entry in shard_order or ()
            if len(entry.mesh_dims) > 1
            for i, axis in enumerate(entry.mesh_dims)
        }
        return "".join(f"{p}{positions.get(axis, '')}" for axis, p in enumerate(placements))

    @staticmethod
    def compute_default_shard_order(placements: Sequence[Placement]) -> ShardOrder:
        """The axes that split each dim, in the order of the mesh.

        >>> import shardwise as sw
        >>> DTensorSpec.compute_default_shard_order((sw.Shard(1), sw.Shard(0), sw.Shard(1)))
        (ShardOrderEntry(tensor_dim=0, mesh_dims=(1,)), ShardOrderEntry(tensor_dim=1, mesh_dims=(0, 2)))
        """
        axes: dict[int, list[int]] = {}
        for axis, p in enumerate(placements):
            if isinstance(p, Shard):
                axes.setdefault(p.dim, []).append(axis)
        return tuple(ShardOrderEntry(dim, tuple(axes[dim])) for dim in sorted(axes))

    @staticmethod
    def is_default_device_order(shard_order: Sequence[ShardOrderEntry]) -> bool:
        """Whether the axes that split each dim are in the order of the mesh."""
        return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in shard_order)

    @staticmethod
    def from_dim_map(
        mesh: DeviceMesh, dim_map: Sequence[int], sums: Sequence[int], tensor_meta: TensorMeta | None = None
    ) -> Any:
        """The spec of a tensor, given for each dim the axis that splits it or -1, and the axes with a pending sum."""
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for axis in sums:
            placements[axis] = Partial()
        for dim, axis in enumerate(dim_map):
            if axis < 0:
                continue
            if not isinstance(placements[axis], Replicate):
                raise RuntimeError(
                    f"DTensorSpec.from_dim_map got axis {axis} for dim {dim} and for another use.\n"
                    f"  why: It has {placements[axis]} already, and an axis has one placement.\n"
                    "  fix: Name each axis once, in dim_map or in sums."
                )
            placements[axis] = Shard(dim)
        return placed_spec(mesh, placements, tensor_meta)

    @staticmethod
    def _convert_shard_order_to_StridedShard(  # noqa: N802
        shard_order: Sequence[ShardOrderEntry], placements: Sequence[Placement], mesh: DeviceMesh
    ) -> tuple[Placement, ...]:
        """The placements that say the same order: an axis inside of later ones counts their blocks."""
        out = list(placements)
        for dim, axes in shard_order:
            for i, axis in enumerate(axes):
                blocks = math.prod(mesh.size(other) for other in axes[:i] if other > axis)
                out[axis] = Shard(dim) if blocks == 1 else StridedShard(dim, split_factor=blocks)
        return tuple(out)

    @staticmethod
    def _maybe_convert_StridedShard_to_shard_order(  # noqa: N802
        placements: Sequence[Placement], mesh: DeviceMesh
    ) -> ShardOrder | None:
        """The order that the placements say, or None if a split factor is not the number of blocks of later axes."""
        axes: dict[int, list[int]] = {}
        for axis in reversed(range(len(placements))):
            p = placements[axis]
            if not isinstance(p, Shard | StridedShard):
                continue
            later, blocks = axes.setdefault(p.dim, []), 1 if isinstance(p, Shard) else p.split_factor
            counts = [math.prod(mesh.size(a) for a in later[:i]) for i in range(len(later) + 1)]
            if blocks not in counts:
                return None
            later.insert(counts.index(blocks), axis)
        return tuple(ShardOrderEntry(dim, tuple(axes[dim])) for dim in sorted(axes))


__getattr__ = reexports("_dtensor_spec")
