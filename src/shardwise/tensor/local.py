"""Between plain tensors and DTensors: `from_local` and `to_local`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import (
    PerMesh,
    PerRank,
    axes_of,
    check_reducible,
    coord_of,
    current_mesh,
    detached,
    is_simulated,
    is_sparse,
    members_of,
)
from shardwise.layout import (
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Spec,
    block_shape,
    global_shape,
    global_stride,
)
from shardwise.tensor.autograd import FromLocal, ToLocal, contiguous_stride
from shardwise.tensor.consistency import checked_shape
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import check_whole, made, nothing_like

__all__ = ["check_device", "from_local", "to_local"]


def check_device(tensor: Tensor, mesh: DeviceMesh, what: str) -> None:
    """Raise if a tensor is not where the mesh's devices are."""
    if tensor.device.type not in (mesh.device_type, "meta"):
        raise LayoutError(
            f"{what} got a tensor on {tensor.device} for a mesh of {mesh.device_type} devices.",
            why="blocks live on the devices of their mesh",
            fix=f"x.to({mesh.device_type!r}) first",
        )
    if tensor.layout is not torch.strided and not is_sparse(tensor):
        raise LayoutError(
            f"{what} got a tensor of layout {tensor.layout}.",
            why="blocks are strided tensors, or sparse",
            fix="x.to_dense() first",
        )


def from_local(
    local: Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    *,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """See `DTensor.from_local`."""
    mesh = current_mesh(mesh, "DTensor.from_local")
    if isinstance(local, DTensor) or not isinstance(local, Tensor):
        raise LayoutError(
            f"the local_tensor argument only accepts torch.Tensor but got {type(local)} value.",
            why="a block is a plain tensor",
            fix="x.to_local() for its block, or x.redistribute(…) for another layout",
        )
    if isinstance(local, PerRank):
        local = _on_mesh(local, mesh)
    asked = (placements, shape, stride)
    plain = all(x is None or isinstance(x, Sequence) for x in asked)  # what is not has its error to come
    if run_check or is_simulated() or isinstance(local, PerRank) or not plain or local.layout is not _STRIDED:
        spec = _spec(local, mesh, placements, run_check, shape, stride)
    else:
        given = tuple([None if x is None else tuple(x) for x in asked])
        key = (given, local.shape, local.stride(), local.dtype, local.device)
        spec = _known.get(mesh, key, lambda: _spec(local, mesh, placements, False, shape, stride))
    lie = None if grad_placements is None else _grads_lie(spec.layout, grad_placements, "from_local")
    if isinstance(local, PerRank) or is_simulated():
        ranks = tuple(members_of(mesh))
        if isinstance(local, PerRank):
            blocks = tuple(local.of_rank(r) for r in ranks)
        else:
            blocks = _Spread.apply(local, len(ranks))  # type: ignore[no-untyped-call]
        return FromLocal.apply(spec, lie, ranks, *blocks)  # type: ignore[no-any-return, no-untyped-call]
    if coord_of(mesh) is None:
        # a rank that is not on the mesh holds nothing, whatever was passed
        local = nothing_like(local).requires_grad_(local.requires_grad)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return DTensor(local.detach(), spec) if spec.stride is not None else made(local.detach(), spec)
    return FromLocal.apply(spec, lie, None, local)  # type: ignore[no-any-return, no-untyped-call]


_known = PerMesh(most=1024)
_STRIDED = torch.strided


def _spec(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Spec:
    """The spec of blocks like this one, after everything about them is checked."""
    check_device(local, mesh, "DTensor.from_local")
    if stride is not None and shape is None:
        raise LayoutError(
            f"from_local got stride {tuple(stride)} without shape.",
            why="strides say nothing of sizes. Please pass both shape and stride at the same time.",
            fix="pass shape= as well",
        )
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    for p in placements:
        if isinstance(p, Partial):
            check_reducible(local.dtype, p.reduce_op)
    layout = _layout(local, mesh, placements, run_check, shape)
    first = local.ranks[0] if isinstance(local, PerRank) else local
    if is_sparse(local):
        check_whole(layout, "from_local")
        return Spec(mesh, layout, local.dtype, torch.Size(layout.shape), None)
    if stride is not None:
        whole_stride = tuple(stride)
        if len(whole_stride) != layout.ndim:
            raise LayoutError(
                f"from_local got stride {whole_stride} for shape {layout.shape}.",
                why=f"each of the {layout.ndim} dims has one",
                fix="leave stride out: it follows from the block's",
            )
    elif first.dim() == layout.ndim:
        whole_stride = global_stride(layout.shape, first.stride())
    else:
        whole_stride = contiguous_stride(layout.shape)
    return Spec(mesh, layout, local.dtype, torch.Size(layout.shape), whole_stride)


def _on_mesh(local: PerRank, mesh: DeviceMesh) -> PerRank:
    """The blocks of the mesh's own ranks: what the others hold is no part of the tensor."""
    ranks = members_of(mesh)
    if lack := [r for r in ranks if r not in local._blocks]:
        raise LayoutError(
            f"from_local got blocks of ranks {tuple(local._blocks)}, and none of {', '.join(map(str, lack))}.",
            why=f"each rank of the mesh holds a block, and the mesh is of ranks {tuple(ranks)}",
            fix="make them with shardwise.per_rank(lambda rank: …)",
        )
    return PerRank({r: local.of_rank(r) for r in ranks})


def _grads_lie(layout: Layout, placements: Sequence[Placement], what: str) -> Layout:
    """The layout of the blocks' gradients, which have the blocks' shapes."""
    lie = Layout.of(layout.shape, layout.axes, placements)
    if lie.dims != layout.dims:
        raise LayoutError(
            f"{what} of {layout} got grad_placements that are {lie}.",
            why="the gradient of a block is about the same elements, so the same axes split the same dims",
            fix="keep Shard where the tensor has it; Replicate and Partial may be exchanged",
        )
    return lie


class _Spread(torch.autograd.Function):
    """A plain tensor in a simulation: the same block on every rank, each in memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return tuple(detached(x) if i == 0 else x.clone() for i in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, *others = (g.to_dense() for g in grads)
        if any(not torch.equal(g, first) for g in others):
            raise RuntimeError(
                "the gradient of a plain tensor given to from_local differs between the simulated ranks.\n"
                "  why: each rank has its own copy of the block and so its own gradient; one tensor cannot hold both\n"
                "  fix: from_local(shardwise.per_rank(lambda rank: x.detach().clone().requires_grad_()), …)"
            )
        return grads[0], None


def _layout(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    run_check: bool,
    shape: Sequence[int] | None,
) -> Layout:
    """The layout of blocks like this one, with the block held against it."""
    axes = axes_of(mesh)
    if run_check and mesh.size() > 1:
        shape = checked_shape(local, mesh, placements, shape)
    blocks = dict(local._blocks) if isinstance(local, PerRank) else {}
    first = next(iter(blocks.values())) if blocks else local
    if shape is None:
        shape = global_shape(Layout.of(first.shape, axes, placements), first.shape)
    layout = Layout.of(shape, axes, placements)
    if blocks:
        places = {r: c for r, c in members_of(mesh).items() if r in blocks}
    else:
        me = coord_of(mesh)
        places, blocks = ({}, {}) if me is None else ({mesh.get_rank(): me}, {mesh.get_rank(): local})
        if is_simulated():
            places, blocks = members_of(mesh), dict.fromkeys(members_of(mesh), local)
    for rank, coord in places.items():
        if tuple(blocks[rank].shape) != block_shape(layout, coord):
            raise LayoutError(
                f"rank {rank} has a block of shape {tuple(blocks[rank].shape)} where {layout} has one of "
                f"{block_shape(layout, coord)}.",
                why="blocks are cut as torch.chunk cuts: ceil-sized, the last ones smaller or empty",
                fix="pass the global shape=, or distribute_tensor the whole tensor",
            )
    return layout


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `DTensor.to_local`."""
    lie = None if grad_placements is None else _grads_lie(x.layout, grad_placements, "to_local")
    local = x._local_tensor
    if torch.is_grad_enabled():
        blocks = ToLocal.apply(x, lie)  # type: ignore[no-untyped-call]
        result = (
            PerRank(dict(zip(local._blocks, blocks, strict=True)))
            if isinstance(local, PerRank)
            else blocks[0]
        )
    else:
        result = local
    if getattr(x, "_is_param", False) and not isinstance(result, PerRank):
        # the block of a parameter is one too; on a fresh tensor, so that ours stays unmarked
        result = detached(result) if result is local else result
        result._is_param = True
    return result
