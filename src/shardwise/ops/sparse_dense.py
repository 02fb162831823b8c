"""Ops of a sparse tensor, which is replicated, and a split dense one: on the blocks, with little or no communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.call.schema import op_info
from shardwise.comm import cut_sparse, map_ranks, on_mesh, parts_of
from shardwise.comm.sparse_parts import places_in, sparse_of
from shardwise.layout import Factor, Layout, Spec, contiguous_stride
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout
from shardwise.tensor.sparse_tensor import holds_sparse

__all__ = ["ON_BLOCKS"]

aten = torch.ops.aten
_OnBlocks = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # None if it does not handle the call


def _is_split(x: Any) -> bool:
    return isinstance(x, DTensor) and not holds_sparse(x) and bool(x._spec.layout.sharded)


def _is_coo(x: Any) -> bool:
    return isinstance(x, DTensor) and holds_sparse(x) and x._local_tensor.layout is torch.sparse_coo


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sparse tensor added to a split one: each rank adds the elements in its block."""
    x, y = args[:2]
    if not _is_split(x) or not _is_coo(y) or x._spec.layout.partial or x.shape != y.shape:
        return None
    layout = x._spec.layout

    def local(coord: Any, block: Tensor, full: Tensor) -> Tensor:
        return func(block, cut_sparse(full, layout, coord), *args[2:], **kwargs)  # type: ignore[no-any-return]

    block = on_mesh(x.device_mesh, local, x._local_tensor, y._local_tensor)
    target = op_info(func).returned_argument(args, kwargs)
    return DTensor(block, x._spec.with_dtype(block.dtype)) if target is None else target


def _sparse_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The elements of a split tensor that a mask has: each rank looks up its own, and they are summed."""
    x, mask = args[:2]
    if not _is_split(x) or not _is_coo(mask) or x._spec.layout.partial or x.shape != mask.shape:
        return None
    layout = x._spec.layout
    if any(f.axes for dim in layout.dims[mask.sparse_dim() :] for f in dim):
        return None

    def local(coord: Any, block: Tensor, mask: Tensor) -> Tensor:
        indices, values = parts_of(mask)
        inside, here = places_in(indices, layout, coord)
        found = block.new_zeros(values.shape)
        found[inside] = block[tuple(here[:, inside])]
        return found

    found = on_mesh(x.device_mesh, local, x._local_tensor, mask._local_tensor)
    replicated = Layout.replicated(found.shape, layout.axes)
    pending = replicated.with_partial(dict.fromkeys(layout.sharded, "sum"))
    spec = Spec(x.device_mesh, pending, x.dtype, found.shape, contiguous_stride(found.shape))
    values = to_layout(func, DTensor(found, spec), replicated)._local_tensor
    result = map_ranks(_with_values, mask._local_tensor, values)
    return replicate(result, x.device_mesh)


def _with_values(t: Tensor, values: Tensor) -> Tensor:
    return sparse_of([parts_of(t)[0], values], t, t.is_coalesced())


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A matrix product in which the dense matrix stays split along the dim that the result shares."""
    *added, x, y = args
    if (added and kwargs.get("beta", 1) != 0) or not _is_one_sparse(x, y):
        return None
    dense, sparse, dim = (y, x, 1) if holds_sparse(x) else (x, y, 0)
    layout: Layout = dense._spec.layout
    if not any(f.axes for f in layout.dims[dim]):
        return None
    target = layout.with_partial({}).with_dim(1 - dim, Factor(dense.shape[1 - dim]))
    block = to_layout(func, dense, target)._local_tensor
    size = sparse.shape[1 - dim]

    def local(matrix: Tensor, part: Tensor) -> Tensor:
        if not part.numel():  # some kernels do not accept tensors without elements
            return part.new_zeros((part.shape[0], size) if dim == 0 else (size, part.shape[1]))
        pair = (part, matrix) if dim == 0 else (matrix, part)
        zeros = [part.new_zeros(()) for _ in added]  # torch.sparse.mm adds 0 times a matrix of zeros
        return func(*zeros, *pair, **kwargs)  # type: ignore[no-any-return]

    result = map_ranks(local, sparse._local_tensor, block)
    after = target.with_dim(1 - dim, Factor(size))
    stride = contiguous_stride(after.shape)
    return DTensor(result, Spec(dense.device_mesh, after, result.dtype, torch.Size(after.shape), stride))


def _is_one_sparse(x: Any, y: Any) -> bool:
    pair = isinstance(x, DTensor) and isinstance(y, DTensor) and x.dim() == y.dim() == 2
    return pair and holds_sparse(x) != holds_sparse(y)


ON_BLOCKS: dict[Any, _OnBlocks] = {
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor), _add),
    aten.sparse_mask.default: _sparse_mask,
    aten.mm.default: _matmul,
    aten._sparse_addmm.default: _matmul,
}
