"""Distributing a full tensor over a mesh."""

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
    coord_of,
    current_mesh,
    is_simulated,
    is_sparse,
    on_mesh,
    spread,
)
from shardwise.comm.local_mode import outside_local_mode, to_per_rank
from shardwise.comm.scatter import scatter
from shardwise.comm.sparse_parts import scatter_sparse
from shardwise.layout import (
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Spec,
    UnitPlacements,
    contiguous_stride,
    unit_placements,
)
from shardwise.tensor.construct import empty_like_block, from_block
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.local import check_device
from shardwise.tensor.observe import observers
from shardwise.tensor.redistribute import to_layout
from shardwise.tensor.sparse_tensor import check_replicated
from shardwise.torch_internals.graph_calls import call_in_graph
from shardwise.torch_internals.patches import outside_transforms, unwrap_transforms

__all__ = ["distribute_tensor"]


@call_in_graph
@outside_local_mode
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a full tensor over a mesh.

    Args:
        tensor: the full tensor, a leaf. A DTensor that already has the wanted layout is returned as it is.
        device_mesh: the mesh; by default the one of the `with mesh:` around the call.
        placements: one placement per mesh axis; by default all `Replicate()`.
        src_data_rank: the coordinate, along every mesh axis, of the rank whose `tensor` is distributed. With None, each
            rank takes its block from its own `tensor`.

    Returns:
        A DTensor with blocks in memory of their own. It is a leaf, and requires a gradient if `tensor` does.

    Raises:
        LayoutError: `tensor` is not a leaf or is a DTensor in another layout, the placements do not fit the shape or the
            mesh, or `src_data_rank` is not on the mesh.
        MeshError: `tensor` is a DTensor on another mesh.
        TypeError: `tensor` is not a tensor.

    The source rank sends each rank its block; with `src_data_rank=None` nothing is communicated.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.distribute_tensor(torch.eye(3), mesh, [sw.Shard(0)]).to_local().ranks[1]
    tensor([[0., 0., 1.]])
    """
    mesh = current_mesh(device_mesh, "distribute_tensor")
    _check_leaf(tensor)
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.of(tensor.shape, axes_of(mesh), placements)
    if isinstance(tensor, DTensor):
        return _check_layout(tensor, mesh, layout)
    check_device(tensor, mesh, "distribute_tensor")
    for p in layout.placements:
        if isinstance(p, Partial):
            check_reducible(tensor.dtype, p.reduce_op)
    _check_source(src_data_rank, mesh)
    units = unit_placements(layout, placements)
    full = _without_transforms(tensor)
    with outside_transforms():
        out = _distribute(to_per_rank(full.detach()), mesh, layout, units, src_data_rank)
    if tensor.requires_grad:  # torch.func transforms refuse even requires_grad_(False)
        out.requires_grad_()
    return out


def _check_leaf(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"distribute_tensor got a {type(tensor).__name__}.\n"
            "  why: Only tensors can be distributed.\n"
            "  fix: distribute_tensor(torch.as_tensor(x), ...)"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor!",
            why="The result is a leaf, so gradients would not reach the inputs of this tensor.",
            fix="distribute_tensor(x.detach(), ...), or DTensor.from_local(block, ...) inside a computation.",
        )


def _without_transforms(tensor: Tensor) -> Tensor:
    """The tensor itself: inside torch.func transforms, torch wraps also what does not depend on their inputs."""
    plain: Tensor = unwrap_transforms(tensor)
    if plain.shape != tensor.shape:
        raise LayoutError(
            f"distribute_tensor got a tensor that vmap maps over: of shape {tuple(tensor.shape)}, one of many.",
            why="Each rank would have to get a part of each of them.",
            fix="distribute the whole tensor before vmap, or pass it with in_dims=None.",
        )
    return plain


def _distribute(
    full: Tensor, mesh: DeviceMesh, layout: Layout, units: UnitPlacements, src_data_rank: int | None
) -> DTensor:
    """The DTensor of a full tensor after all checks."""
    settled = layout.with_partial({})
    if is_simulated() and not isinstance(full, PerRank):
        full = spread(full, range(torch.distributed.get_world_size()))
    if is_sparse(full):
        check_replicated(layout, "distribute_tensor")
        block = scatter_sparse(full, mesh, src_data_rank)
    elif src_data_rank is None:
        if observers and coord_of(mesh) is not None:
            observers[-1].claim_equal(full, mesh, "distribute_tensor(..., src_data_rank=None)")
        block = on_mesh(mesh, lambda coord, t: block_of(t, settled, coord), full)
    else:
        block = scatter(full, settled, mesh, src_data_rank)
    if block is None:
        block = empty_like_block(full)
    shape = torch.Size(layout.shape)
    stride = None if is_sparse(full) else contiguous_stride(shape)
    spec = Spec(mesh, settled, full.dtype, shape, stride, () if stride is None else units)
    return to_layout(from_block(block, spec), layout)


def _check_layout(x: DTensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """The DTensor, if it has this layout on this mesh."""
    if x.device_mesh != mesh:
        raise MeshError(
            f"Cannot distribute a DTensor on {x.device_mesh} to a different device mesh, {mesh}.",
            why="It is already distributed, over another mesh.",
            fix="distribute_tensor(x.full_tensor(), mesh, placements, src_data_rank=None)",
        )
    if x._spec.layout is not layout:
        raise LayoutError(
            f"Cannot distribute a DTensor {x._spec} to a different placements: {layout}.",
            why="It is already distributed; do you want to call `redistribute` instead?",
            fix="x.redistribute(placements=placements)",
        )
    return x


def _check_source(source: int | None, mesh: DeviceMesh) -> None:
    axes = axes_of(mesh)
    if source is not None and not 0 <= source < min(axes.sizes):
        raise LayoutError(
            f"distribute_tensor got src_data_rank={source}, which is not on the mesh.",
            why=f"The source is the rank with that coordinate on every axis, and the mesh is ({axes}).",
            fix=f"Use 0..{min(axes.sizes) - 1}, or None to take each block from the rank's own tensor.",
        )
