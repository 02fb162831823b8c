"""Geometry for this process: its own block's shape and place."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, coord_of
from shardwise.layout import Layout, Placement, block_offset, block_shape

__all__ = ["compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's block and the global index it begins at, per dim.

    Off the mesh it is `((0,), ())`; with `skip_offset` the second is empty.
    """
    coord = coord_of(mesh)
    if coord is None:
        return (0,), ()
    layout = Layout.of(tuple(global_shape), axes_of(mesh), placements)
    return block_shape(layout, coord), () if skip_offset else block_offset(layout, coord)
