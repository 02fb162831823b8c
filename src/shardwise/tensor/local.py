"""Conversion between local tensors and DTensors: `from_local` and `to_local`."""

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
    first_rank,
    is_simulated,
    is_sparse,
    map_ranks,
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
    contiguous_stride,
    global_shape,
    global_stride,
    unit_placements,
)
from shardwise.layout.sizes import are_symbolic
from shardwise.tensor.async_tensor import AsyncDTensor
from shardwise.tensor.autograd import FromLocal, ToLocal, join_blocks
from shardwise.tensor.consistency import checked_shape
from shardwise.tensor.construct import empty_like_block, from_block
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.observe import observers
from shardwise.tensor.recorded_calls import record_local, recorder_of
from shardwise.tensor.sparse_tensor import check_replicated
from shardwise.torch_internals.subclass import is_parameter, mark_parameter, storage_id, view_base

__all__ = ["check_device", "from_local", "to_local"]


def check_device(tensor: Tensor, mesh: DeviceMesh, what: str) -> None:
    """Raise if a tensor is not on the mesh's device type, or neither strided nor sparse."""
    if tensor.device.type not in (mesh.device_type, "meta"):
        raise LayoutError(
            f"{what} got a tensor on {tensor.device} for a mesh of {mesh.device_type} devices.",
            why="Blocks are on the devices of their mesh.",
            fix=f"Move it first: x.to({mesh.device_type!r})",
        )
    if tensor.layout is not torch.strided and not is_sparse(tensor):
        raise LayoutError(
            f"{what} got a tensor of layout {tensor.layout}.",
            why="Blocks are strided or sparse tensors.",
            fix="Convert it first: x.to_dense()",
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
            why="A block is a plain tensor.",
            fix="Pass x.to_local(), or use x.redistribute(...) for another layout.",
        )
    if isinstance(local, PerRank):
        local = _blocks_on(local.tracked, mesh)
    given = (placements, shape, stride)
    simulated = is_simulated() or isinstance(local, PerRank)
    cacheable = all(x is None or isinstance(x, Sequence) for x in given)  # others raise in `_spec`
    if run_check or simulated or not cacheable or local.layout is not _STRIDED:
        spec = _spec(local, mesh, placements, run_check, shape, stride)
    else:
        known = tuple([None if x is None else tuple(x) for x in given])
        key = (known, local.shape, local.stride(), local.dtype, local.device)
        try:
            spec = _specs.get(mesh, key, lambda: _spec(local, mesh, placements, False, shape, stride))
        except TypeError:  # symbolic sizes
            spec = _spec(local, mesh, placements, False, shape, stride)
    grads = None if grad_placements is None else _grads_layout(spec.layout, grad_placements, "from_local")
    if observers and (simulated or coord_of(mesh) is not None):
        observers[-1].claim(local, spec, "from_local")
    if simulated:
        ranks = tuple(members_of(mesh))
        blocks = local.ranks if isinstance(local, PerRank) else _Spread.apply(local, len(ranks))  # type: ignore[no-untyped-call]
        return FromLocal.apply(spec, grads, ranks, *blocks)  # type: ignore[no-any-return, no-untyped-call]
    if coord_of(mesh) is None:
        # a rank that is not on the mesh holds no elements, whatever was passed
        local = empty_like_block(local).requires_grad_(local.requires_grad)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return from_block(local.detach(), spec)
    return FromLocal.apply(spec, grads, None, local)  # type: ignore[no-any-return, no-untyped-call]


_specs = PerMesh(most=1024)
_STRIDED = torch.strided


def _spec(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Spec:
    """The spec of the DTensor with this block, after all checks."""
    check_device(local, mesh, "DTensor.from_local")
    if stride is not None and shape is None:
        raise LayoutError(
            f"from_local got stride {tuple(stride)} without shape.",
            why="Strides do not determine sizes. Please pass both shape and stride at the same time.",
            fix="from_local(local, mesh, placements, shape=..., stride=...)",
        )
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    for p in placements:
        if isinstance(p, Partial):
            check_reducible(local.dtype, p.reduce_op)
    layout = _layout(local, mesh, placements, run_check, shape)
    first = first_rank(local)
    if is_sparse(local):
        check_replicated(layout, "from_local")
        return Spec(mesh, layout, local.dtype, torch.Size(layout.shape), None)
    if stride is not None:
        full_stride = tuple(stride)
        if len(full_stride) != layout.ndim:
            raise LayoutError(
                f"from_local got stride {full_stride} for shape {layout.shape}.",
                why=f"There is one stride for each of the {layout.ndim} dims.",
                fix="Leave stride out; it follows from the block's.",
            )
    elif first.dim() == layout.ndim:
        full_stride = global_stride(layout.shape, first.stride())
    else:
        full_stride = contiguous_stride(layout.shape)
    units = unit_placements(layout, placements)
    return Spec(mesh, layout, local.dtype, torch.Size(layout.shape), full_stride, units)


def _blocks_on(local: PerRank, mesh: DeviceMesh) -> PerRank:
    """The blocks of the mesh's own ranks; other ranks hold no part of the tensor."""
    ranks = members_of(mesh)
    if lack := [r for r in ranks if r not in local._blocks]:
        raise LayoutError(
            f"from_local got blocks of ranks {tuple(local._blocks)}, but not of {', '.join(map(str, lack))}.",
            why=f"Each rank of the mesh holds a block, and the mesh has ranks {tuple(ranks)}.",
            fix="Create them with shardwise.per_rank(lambda rank: ...).",
        )
    return PerRank({r: local.of_rank(r) for r in ranks})


def _grads_layout(layout: Layout, placements: Sequence[Placement], what: str) -> Layout:
    """The layout of the blocks' gradients, which have the blocks' shapes."""
    grads = Layout.of(layout.shape, layout.axes, placements)
    if grads.dims != layout.dims:
        raise LayoutError(
            f"{what} of {layout} got grad_placements that give {grads}.",
            why="The gradient of a block has the block's elements, so the same axes split the same dims.",
            fix="Keep Shard where the tensor has it; Replicate and Partial may be exchanged.",
        )
    return grads


class _Spread(torch.autograd.Function):
    """A plain tensor in a simulation: the same block on every rank, each with its own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return tuple(detached(x) if i == 0 else x.clone() for i in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, *others = (g.to_dense() for g in grads)
        if any(not torch.equal(g, first) for g in others):
            raise RuntimeError(
                "The gradient of a plain tensor passed to from_local differs between the simulated ranks.\n"
                "  why: Each rank has its own copy of the block and its own gradient; one tensor cannot hold all of them.\n"
                "  fix: from_local(shardwise.per_rank(lambda rank: x.detach().clone().requires_grad_()), ...)"
            )
        return grads[0], None


def _layout(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    run_check: bool,
    shape: Sequence[int] | None,
) -> Layout:
    """The layout of the DTensor with this block, after comparing the block's shape with it."""
    axes, members = axes_of(mesh), members_of(mesh)
    if run_check and mesh.size() > 1:
        shape = checked_shape(local, mesh, placements, shape)
    if shape is None:
        here = first_rank(local).shape
        # only the axes of this layout count; of symbols, those of a size that can be split
        some = [n * axes.count for n in here] if are_symbolic(here) else here
        shape = global_shape(Layout.of(some, axes, placements), here)
    layout = Layout.of(shape, axes, placements)
    if isinstance(local, PerRank):
        blocks = local._blocks
    elif is_simulated():
        blocks = dict.fromkeys(members, local)
    else:
        blocks = {} if coord_of(mesh) is None else {mesh.get_rank(): local}
    for rank, block in blocks.items():
        expected = block_shape(layout, members[rank])
        if tuple(block.shape) != expected:
            raise LayoutError(
                f"Rank {rank} has a block of shape {tuple(block.shape)} where {layout} has one of {expected}.",
                why="Dims are split as torch.chunk splits: equal blocks rounded up, the last ones smaller or empty.",
                fix="Pass the global shape=, or use distribute_tensor on the full tensor.",
            )
    return layout


def _share_versions(view: DTensor) -> None:
    """Have the block of a view count versions with the block that it is a view of: its user may write to it.

    Views of blocks are made beneath the code that has them share a counter.
    """
    base = view_base(view)
    if not isinstance(base, DTensor) or view._source is not None or base._source is not None:
        return
    if base.dtype is not view.dtype or base.is_inference() or view._spec.stride is None:
        return

    def alias(block: Tensor, whole: Tensor) -> Tensor:
        if storage_id(block) != storage_id(whole) or block.is_inference() or whole.is_inference():
            return block
        return whole.as_strided(block.shape, block.stride(), block.storage_offset()).detach()

    with torch.no_grad():
        view._local_tensor = map_ranks(alias, view._local_tensor, base._local_tensor)


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `DTensor.to_local`."""
    grads = None if grad_placements is None else _grads_layout(x._spec.layout, grad_placements, "to_local")
    if type(x) is AsyncDTensor and not x.requires_grad:
        unfinished = x.unfinished_block()
        if unfinished is not None:
            return unfinished
    if (mode := recorder_of(x)) is not None:
        return record_local(mode, x)  # type: ignore[no-any-return]
    _share_versions(x)
    local = x._local_tensor
    result = local
    if torch.is_grad_enabled():
        ranks = tuple(local._blocks) if isinstance(local, PerRank) else None
        result = join_blocks(ranks, ToLocal.apply(x, grads))  # type: ignore[no-untyped-call]
    if is_parameter(x) and not isinstance(result, PerRank):
        # the block of a parameter is a parameter; a new tensor is marked, and not the block itself
        result = detached(result) if result is local else result
        mark_parameter(result)
    return result
