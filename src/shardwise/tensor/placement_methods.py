"""Methods of placements that communicate, under torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.comm.local_mode import in_local_mode
from shardwise.layout import Layout, Placement, Replicate, Shard, StridedShard, TensorMeta
from shardwise.tensor.construct import from_block
from shardwise.tensor.placed_spec import placed_spec
from shardwise.tensor.redistribute import to_layout

__all__ = ["add_placement_methods"]


@in_local_mode
def _to_replicate_tensor(
    placement: Placement,
    local_tensor: Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    current_logical_shape: Sequence[int],
) -> Tensor:
    """The tensor of which this rank has the block that one axis gives it; it sends one all-gather along that axis."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[mesh_dim] = placement
    shape = torch.Size(current_logical_shape)
    spec = placed_spec(mesh, placements, TensorMeta(shape, None, local_tensor.dtype))
    whole: Any = to_layout(from_block(local_tensor.detach(), spec), Layout.replicated(shape, axes_of(mesh)))
    return whole._local_tensor  # type: ignore[no-any-return]


def add_placement_methods() -> None:
    """Give `Shard` and `_StridedShard` the methods that need a mesh, of which the classes know nothing."""
    for cls in (Shard, StridedShard):
        cls._to_replicate_tensor = _to_replicate_tensor  # type: ignore[union-attr]
