"""Spreading a whole tensor over a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import (
    PerRank,
    axes_of,
    block_of,
    check_reducible,
    current_mesh,
    is_simulated,
    is_sparse,
    on_mesh,
    scatter,
    scatter_sparse,
    spread,
)
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Spec, contiguous_stride
from shardwise.tensor.construct import empty_like_block, from_block
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.local import check_device
from shardwise.tensor.redistribute import to_layout
from shardwise.tensor.sparse_tensor import check_replicated

__all__ = ["distribute_tensor"]


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """The tensor that rank `src_data_rank` of each axis holds, spread over the mesh; a leaf like `tensor`.

    With `src_data_rank=None` each rank cuts its block from its own `tensor`, and nothing is sent.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.distribute_tensor(torch.eye(3), mesh, [sw.Shard(0)]).to_local().ranks[1]
    tensor([[0., 0., 1.]])
    """
    mesh = current_mesh(device_mesh, "distribute_tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"distribute_tensor got {type(tensor).__name__}.\n"
            "  why: it spreads a tensor\n"
            "  fix: torch.as_tensor(x) first"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor!",
            why="the result is a leaf, so gradients would not reach what this tensor was computed from",
            fix="DTensor.from_local(…) inside a computation, or x.detach() first",
        )
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.of(tensor.shape, axes_of(mesh), placements)
    if isinstance(tensor, DTensor):
        return _unchanged(tensor, mesh, layout)
    check_device(tensor, mesh, "distribute_tensor")
    for p in layout.placements:
        if isinstance(p, Partial):
            check_reducible(tensor.dtype, p.reduce_op)
    _check_source(src_data_rank, mesh)
    whole = tensor.detach()
    held = layout.with_partial({})
    if is_simulated() and not isinstance(whole, PerRank):
        whole = spread(whole, range(torch.distributed.get_world_size()))
    if is_sparse(whole):
        check_replicated(layout, "distribute_tensor")
        block = scatter_sparse(whole, mesh, src_data_rank)
    elif src_data_rank is None:
        block = on_mesh(mesh, lambda coord, t: block_of(t, held, coord), whole)
    else:
        block = scatter(whole, held, mesh, src_data_rank)
    if block is None:
        block = empty_like_block(whole)
    shape = torch.Size(layout.shape)
    stride = None if is_sparse(whole) else contiguous_stride(shape)
    out = from_block(block, Spec(mesh, held, tensor.dtype, shape, stride))
    out = to_layout(out, layout)
    out.requires_grad_(tensor.requires_grad)
    return out


def _unchanged(x: DTensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    if x.device_mesh != mesh:
        raise MeshError(
            f"distribute_tensor got a DTensor on {x.device_mesh} for {mesh}.",
            why="it is distributed already, over another mesh",
            fix="distribute_tensor(x.full_tensor(), mesh, …, src_data_rank=None)",
        )
    if x._spec.layout is not layout:
        raise LayoutError(
            f"distribute_tensor got a DTensor {x._spec} to lay out as {layout}.",
            why="it is distributed already; do you want to call `redistribute` instead?",
            fix="x.redistribute(placements=…)",
        )
    return x


def _check_source(source: int | None, mesh: DeviceMesh) -> None:
    axes = axes_of(mesh)
    if source is not None and not 0 <= source < min(axes.sizes):
        raise LayoutError(
            f"src_data_rank={source} is not on the mesh.",
            why=f"the source is the rank with that coord on each axis, and the mesh is ({axes})",
            fix=f"use 0..{min(axes.sizes) - 1}, or None to cut each rank's own tensor",
        )
