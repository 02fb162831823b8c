"""The largest and smallest along a split dim, and where: an exchange of values, then of places."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, exchange_seconds, settled
from shardwise.call.resolve import Prepared
from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Factor, Layout, Spec, block_shape, cut
from shardwise.tensor.autograd import contiguous_stride, redistributed
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten


def _places(x: DTensor, dim: int) -> DTensor:
    """The global index along a dim, lying as the dim does, in a shape that meets the tensor's."""
    n = x.shape[dim]
    local = torch.arange(n, device=x._local_tensor.device)
    block: Tensor = (
        map_ranks(lambda _: local, x._local_tensor) if isinstance(x._local_tensor, PerRank) else local
    )
    whole = Layout.replicated((n,), x.layout.axes)
    out = redistributed(
        DTensor(block, Spec(x.device_mesh, whole, torch.int64, torch.Size((n,)), (1,))),
        Layout(x.layout.axes, [x.layout.dims[dim]]),
    )
    return out.view([n if d == dim else 1 for d in range(x.dim())])  # type: ignore[return-value]


def _found(func: Any, x: DTensor, dims: list[int], largest: bool) -> tuple[Tensor, Tensor]:
    """The extreme over some dims, and the first place where it is, as an index into those dims flattened."""
    best = x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    best = settled(func, best)
    there = x == best
    if x.dtype.is_floating_point:
        there = there | x.isnan()  # a NaN is taken for the extreme, and then only NaNs are
    place: Any = 0
    for d in dims:
        place = place * x.shape[d] + _places(x, d)
    count = math.prod(x.shape[d] for d in dims)
    return best, settled(func, torch.where(there, place, count).amin(dims, keepdim=True))


def _argmost(largest: bool) -> Callable[..., Any]:
    def run(x: DTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        dims = list(range(x.dim())) if dim is None else [dim % x.dim()]
        _, place = _found(aten.argmax.default if largest else aten.argmin.default, x, dims, largest)
        return place if keepdim else place.squeeze(dims)

    return run


def _most(largest: bool) -> Callable[..., Any]:
    def run(x: DTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        best, place = _found(aten.max.dim if largest else aten.min.dim, x, [dim % x.dim()], largest)
        return (best, place) if keepdim else (best.squeeze(dim), place.squeeze(dim))

    return run


def _aminmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dim is None else [dim]
    return x.amin(dims, keepdim=keepdim), x.amax(dims, keepdim=keepdim)


def _exchanged(count: int, itemsize: int, run: Callable[..., Any], least: int = 0) -> Maker:
    """Offers of a program that exchanges `count` results, of the op's own size, where the rows are split."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        x: DTensor = args[0]
        if recipe is None or recipe.moves[0] is None or x._spec.layout.partial or 0 in x.shape:
            return None
        if x.dtype.is_complex or x.dim() == 0:
            return None
        size = math.prod(recipe.outputs[0].shape)
        return Offer(exchange_seconds(x._spec.layout, count, size, itemsize), run)

    return make


def _topk_of(x: DTensor, k: int, dim: int, largest: bool, in_order: bool) -> tuple[Tensor, Tensor]:
    """The k extremes of each block, put together, and of those the k extremes again."""
    d = dim % x.dim()
    places = _places(x, d)

    def here(block: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        values, where = block.topk(k, d, largest, True)
        return values, at.expand(block.shape).gather(d, where)

    values, where = map_ranks(here, x._local_tensor, places._local_tensor)
    (factor,) = x.layout.dims[d]
    shape = list(x.shape)
    shape[d] = k * math.prod(x.layout.axes.sizes[a] for a in factor.axes)
    lie = x.layout.with_dim(d, Factor(shape[d], factor.axes))
    target = lie.without(factor.axes)

    def joined(block: Tensor) -> DTensor:
        spec = Spec(x.device_mesh, lie, block.dtype, torch.Size(shape), contiguous_stride(tuple(shape)))
        return redistributed(DTensor(block, spec), target)

    best, at = aten.topk.default(joined(values), k, d, largest, in_order)
    return best, aten.gather.default(joined(where), d, at)


def _topk(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
    """Offered where every rank has at least k along the dim, so that nothing need be made up."""
    x: DTensor = args[0]
    given: list[Any] = [*args[1:], *(-1, True, True)[len(args) - 2 :]]
    k, dim, largest, in_order = given
    if kwargs or recipe is None or x._spec.layout.partial or not x.dim() or not k or 0 in x.shape:
        return None
    layout, d = x._spec.layout, dim % x.dim()
    (factor, *more) = layout.dims[d]
    sizes = [layout.axes.sizes[a] for a in factor.axes]
    low, high = cut(factor.size, sizes, [n - 1 for n in sizes])
    if more or not factor.axes or high - low < k:
        return None
    rows = math.prod(block_shape(layout, [0] * len(layout.axes))) // max(high - low, 1)
    sent = rows * k * math.prod(sizes) // 2  # a gather sends about half of what an all-reduce does
    seconds = exchange_seconds(layout, 1, sent, x.dtype.itemsize) + exchange_seconds(layout, 1, sent, 8)
    return Offer(seconds, lambda x, *_: _topk_of(x, k, d, largest, in_order))


OFFERS: dict[Any, Maker] = {
    aten.argmax.default: _exchanged(2, 8, _argmost(largest=True)),
    aten.argmin.default: _exchanged(2, 8, _argmost(largest=False)),
    aten.max.dim: _exchanged(2, 8, _most(largest=True)),
    aten.min.dim: _exchanged(2, 8, _most(largest=False)),
    # parts of a minimum and of a maximum need no exchange until someone asks
    aten.aminmax.default: _exchanged(0, 8, _aminmax),
    aten._aminmax.default: _exchanged(0, 8, _aminmax),
    aten._aminmax.dim: _exchanged(0, 8, _aminmax),
    aten.topk.default: _topk,
}
