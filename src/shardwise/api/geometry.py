"""The shape and the offset of this rank's block."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of
from shardwise.layout import Layout, Placement, block_offset, block_shape
from shardwise.torch_internals.local_tensor import for_each_rank

__all__ = ["compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's block of a tensor, and the global index at which it begins, per dim.

    Args:
        global_shape: the shape of the full tensor.
        mesh: the mesh.
        placements: one placement per mesh axis.
        skip_offset: return `()` for the offset.

    Returns:
        The shape and the offset; `((0,), ())` on a rank that is not on the mesh.

    Raises:
        LayoutError: the placements do not fit the shape or the mesh.

    Nothing is communicated.
    """
    coord = coord_of(mesh)
    if coord is None:
        return (0,), ()
    layout = Layout.of(tuple(global_shape), axes_of(mesh), placements)
    return _shape_at(layout, *coord), () if skip_offset else _offset_at(layout, *coord)


@for_each_rank
def _shape_at(layout: Layout, *coord: int) -> tuple[int, ...]:
    return block_shape(layout, coord)


@for_each_rank
def _offset_at(layout: Layout, *coord: int) -> tuple[int, ...]:
    return block_offset(layout, coord)
