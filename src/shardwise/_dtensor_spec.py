"""Where torch keeps the spec of a DTensor; here it is `shardwise.layout.Spec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.layout import Layout, LayoutError, Placement, Spec, TensorMeta, unit_placements

__all__ = ["DTensorSpec", "TensorMeta"]


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

    Raises:
        LayoutError: the placements do not fit, or `tensor_meta` is None.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     DTensorSpec(mesh, (sw.Shard(0),), TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32))
    Spec(f32[4:tp, 3] on tp=2)
    """

    def __new__(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], tensor_meta: TensorMeta | None = None
    ) -> Any:
        if tensor_meta is None:
            raise LayoutError(
                "DTensorSpec got no tensor_meta.",
                why="How an axis splits a tensor depends on the tensor's shape.",
                fix="DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))",
            )
        shape, stride, dtype = tensor_meta
        layout = Layout.of(shape, axes_of(mesh), placements)
        return Spec(mesh, layout, dtype, shape, tuple(stride or ()), unit_placements(layout, placements))
