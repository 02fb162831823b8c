"""Where torch keeps collectives along one axis of a mesh, and padding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._absent import absent
from shardwise.layout import Placement, Replicate, Shard, Spec
from shardwise.plan import plan_redistribute
from shardwise.plan.settings import current_costs
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "fill_empty_tensor_to_shards",
    "mesh_broadcast",
    "mesh_scatter",
    "pad_tensor",
    "redistribute_cost",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "unpad_tensor",
]


def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
) -> Any:
    """Broadcast a tensor along an axis of the mesh, in place, from the rank with coordinate `group_src` on it."""
    if tensor.is_meta or mesh.get_coordinate() is None:
        return None
    return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), group_src=group_src, async_op=async_op)


def mesh_scatter(
    output: Tensor,
    scatter_list: list[Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> Any:
    """Scatter a list of tensors along an axis of the mesh, from the rank with coordinate `group_src` on it."""
    if output.is_meta or mesh.get_coordinate() is None:
        return None
    group = mesh.get_group(mesh_dim)
    parts = scatter_list if dist.get_rank(group) == group_src else None
    return dist.scatter(output, parts, group=group, group_src=group_src, async_op=async_op)


def shard_dim_alltoall(
    input: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> Tensor:
    """The block of this rank after an axis that splits `gather_dim` splits `shard_dim` instead."""
    before: list[Placement] = [Replicate()] * mesh.ndim
    after = list(before)
    before[mesh_dim], after[mesh_dim] = Shard(gather_dim), Shard(shard_dim)
    return DTensor.from_local(input, mesh, before).redistribute(placements=after).to_local()


def pad_tensor(tensor: Tensor, pad_dim: int, pad_size: int) -> Tensor:
    """The tensor with `pad_size` zeros added at the end of a dim."""
    if pad_size == 0:
        return tensor
    shape = list(tensor.shape)
    shape[pad_dim] = pad_size
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=pad_dim)


def unpad_tensor(tensor: Tensor, pad_dim: int, pad_size: int) -> Tensor:
    """The tensor without the last `pad_size` elements of a dim."""
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


def fill_empty_tensor_to_shards(shards: list[Tensor], shard_dim: int, num_empty_tensors: int) -> list[Tensor]:
    """The shards, with tensors added that are empty along the dim."""
    shape = list(shards[0].shape)
    shape[shard_dim] = 0
    return [*shards, *(shards[0].new_zeros(shape) for _ in range(num_empty_tensors))]


def redistribute_cost(current_spec: Spec, target_spec: Spec) -> float:
    """The microseconds that a redistribution takes by the current cost model; infinite between two meshes."""
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    plan = plan_redistribute(current_spec.layout, target_spec.layout, current_spec.dtype.itemsize)
    return 1e6 * current_costs().total([plan])


def spec_to_bytes(spec: Spec) -> int:
    """The bytes of the full tensor."""
    return int(spec.dtype.itemsize * math.prod(spec.shape))


__getattr__ = absent(
    "_collective_utils",
    "allgather_cost allreduce_cost check_tensor_meta _compute_placement_transition_cost "
    "_mesh_get_process_group_fake _mesh_get_process_group_impl MeshTopoInfo "
    "one_step_redistribute_cost reduce_scatter_cost _shard_dim_alltoall_meta",
    why="Costs come from the current cost model, which a program sets or measures.",
    fix="with shardwise.costs(shardwise.CostModel.measure(mesh)): ...",
)
