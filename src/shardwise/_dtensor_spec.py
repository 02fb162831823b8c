"""Where torch keeps the spec of a DTensor; here it is `shardwise.layout.Spec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Placement, ShardOrderEntry, Spec, TensorMeta
from shardwise.tensor.placed_spec import placed_spec

__all__ = ["DTensorSpec", "ShardOrder", "ShardOrderEntry", "TensorMeta"]

ShardOrder = tuple[ShardOrderEntry, ...]
"""The axes that split each dim, for the dims that axes split."""


class _SpecType(type):
    """`isinstance(x._spec, DTensorSpec)` is true of every spec."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Spec)


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
