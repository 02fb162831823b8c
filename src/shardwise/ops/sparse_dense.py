"""Ops of a sparse tensor, which every rank has, and a split dense one: on the blocks, with little or nothing to send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import replicated_like, returned_by
from shardwise.call.trace import tell
from shardwise.comm import cut_sparse, map_ranks, on_mesh, places_in, sparse_of
from shardwise.layout import Factor, Layout, Spec
from shardwise.plan import plan_redistribute
from shardwise.tensor.autograd import contiguous_stride, redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind
from shardwise.tensor.sparse_tensor import holds_sparse, made

__all__ = ["ON_BLOCKS"]

aten = torch.ops.aten
_OnBlocks = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # None where the call is none of this kind


def _is_split(x: Any) -> bool:
    return isinstance(x, DTensor) and not holds_sparse(x) and bool(x._spec.layout.sharded)


def _is_coo(x: Any) -> bool:
    return isinstance(x, DTensor) and holds_sparse(x) and x._local_tensor.layout is torch.sparse_coo


def _moved(func: Any, x: DTensor, target: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The block of a tensor in another layout."""
    plan = plan_redistribute(x._spec.layout, target, x.dtype.itemsize)
    mind(func, [plan])
    tell(func, "offer", args, kwargs, [plan])
    return redistributed(x, target)._local_tensor


def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sparse tensor added to a split one: each rank adds what is in its block."""
    x, y = args[:2]
    if not _is_split(x) or not _is_coo(y) or x._spec.layout.partial or x.shape != y.shape:
        return None
    tell(func, "offer", args, kwargs)
    layout = x._spec.layout

    def local(coord: Any, block: Tensor, whole: Tensor) -> Tensor:
        return func(block, cut_sparse(whole, layout, coord), *args[2:], **kwargs)  # type: ignore[no-any-return]

    block = on_mesh(x.device_mesh, local, x._local_tensor, y._local_tensor)
    target = returned_by(func, args, kwargs)
    return DTensor(block, x._spec.with_dtype(block.dtype)) if target is None else target


def _masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The elements of a split tensor that a mask has: each rank looks up its own, and they are added up."""
    x, mask = args[:2]
    if not _is_split(x) or not _is_coo(mask) or x._spec.layout.partial or x.shape != mask.shape:
        return None
    layout = x._spec.layout
    if any(f.axes for dim in layout.dims[mask.sparse_dim() :] for f in dim):
        return None

    def local(coord: Any, block: Tensor, kept: Tensor) -> Tensor:
        inside, here = places_in(kept._indices(), layout, coord)
        found = block.new_zeros(kept._values().shape)
        found[inside] = block[tuple(here[:, inside])]
        return found

    found = on_mesh(x.device_mesh, local, x._local_tensor, mask._local_tensor)
    whole = Layout.replicated(found.shape, layout.axes)
    pending = whole.with_partial(dict.fromkeys(layout.sharded, "sum"))
    spec = Spec(x.device_mesh, pending, x.dtype, found.shape, contiguous_stride(found.shape))
    values = _moved(func, DTensor(found, spec), whole, args, kwargs)
    result = map_ranks(_with_values, mask._local_tensor, values)
    return made(result, replicated_like(result, x.device_mesh))


def _with_values(t: Tensor, values: Tensor) -> Tensor:
    return sparse_of([t._indices(), values], t, t.is_coalesced())


def _times(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of matrices, of which the dense one stays split along the dim that the result has too."""
    *added, x, y = args
    if (added and kwargs.get("beta", 1) != 0) or not _are_one_sparse(x, y):
        return None
    dense, sparse, dim = (y, x, 1) if holds_sparse(x) else (x, y, 0)
    layout: Layout = dense._spec.layout
    if not any(f.axes for f in layout.dims[dim]):
        return None
    target = layout.with_partial({}).with_dim(1 - dim, Factor(dense.shape[1 - dim]))
    block = _moved(func, dense, target, args, kwargs)
    size = sparse.shape[1 - dim]

    def local(matrix: Tensor, part: Tensor) -> Tensor:
        if not part.numel():  # not all kernels take one without elements
            return part.new_zeros((part.shape[0], size) if dim == 0 else (size, part.shape[1]))
        pair = (part, matrix) if dim == 0 else (matrix, part)
        nothing = [part.new_zeros(()) for _ in added]  # torch.sparse.mm adds 0 times a matrix of zeros
        return func(*nothing, *pair, **kwargs)  # type: ignore[no-any-return]

    result = map_ranks(local, sparse._local_tensor, block)
    lies = target.with_dim(1 - dim, Factor(size))
    stride = contiguous_stride(lies.shape)
    return DTensor(result, Spec(dense.device_mesh, lies, result.dtype, torch.Size(lies.shape), stride))


def _are_one_sparse(x: Any, y: Any) -> bool:
    pair = isinstance(x, DTensor) and isinstance(y, DTensor) and x.dim() == y.dim() == 2
    return pair and holds_sparse(x) != holds_sparse(y)


ON_BLOCKS: dict[Any, _OnBlocks] = {
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor), _added),
    aten.sparse_mask.default: _masked,
    aten.mm.default: _times,
    aten._sparse_addmm.default: _times,
}
