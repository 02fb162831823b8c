"""Windows along a split dim as a dim of their own: a rank gets what its windows cover, and on the way back, touch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer
from shardwise.alternatives.exchange import by_exchange, named, plain_axes, with_size
from shardwise.alternatives.halo import Halo
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout
from shardwise.plan import plan_exchanges
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _halo(layout: Layout, d: int, given: dict[str, Any], size: int, count: int) -> Halo | None:
    axes = plain_axes(layout, d)
    if axes is None or given["size"] == 0:
        return None
    return Halo(d, axes, layout.axes, Window(given["size"], given["step"]), size, count)


def _unfold(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    given = named(aten.unfold.default, args, kwargs)
    x: DTensor = given["self"]
    if recipe is None or not x.dim():
        return None
    layout, out, d = x._spec.layout, recipe.outputs[0], given["dimension"] % x.dim()
    halo = _halo(layout, d, given, x.shape[d], out.shape[d])
    if halo is None:
        return None
    plan = plan_exchanges(layout, [halo.to_windows()], x.dtype.itemsize)
    size, step = halo.window.size, halo.window.stride

    def after(coord: Coord, block: Tensor) -> Tensor:
        if block.shape[d]:
            return block.unfold(d, size, step)
        return block.new_empty(*block.shape, size)

    kept = with_size(layout, d, out.shape[d], halo.axes)
    lie = kept.with_dims([*kept.dims, (Factor(size),)])
    return by_exchange(aten.unfold.default, plan, [out.with_layout(lie)], after=after)


def _unfold_backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A rank adds up the windows that touch its range, and keeps its range."""
    given = named(aten.unfold_backward.default, args, kwargs)
    grad: DTensor = given["grad_in"]
    layout = grad._spec.layout
    if recipe is None or grad.dim() < 2 or any(f.axes for f in layout.dims[-1]):
        return None
    out, d = recipe.outputs[0], given["dim"] % (grad.dim() - 1)
    halo = _halo(layout, d, given, out.shape[d], grad.shape[d])
    if halo is None:
        return None
    plan = plan_exchanges(layout, [halo.to_positions()], grad.dtype.itemsize)
    size, step = halo.window.size, halo.window.stride

    def after(coord: Coord, block: Tensor) -> Tensor:
        low, high = halo.touched(coord)[1]
        shape = [high - low if e == d else n for e, n in enumerate(block.shape[:-1])]
        some = high > low
        wide = aten.unfold_backward.default(block, shape, d, size, step) if some else block.new_zeros(shape)
        return halo.kept(coord, wide)

    kept = with_size(layout, d, out.shape[d], halo.axes)
    lie = kept.with_dims(kept.dims[:-1])
    return by_exchange(aten.unfold_backward.default, plan, [out.with_layout(lie)], after=after)


OFFERS: dict[Any, Maker] = {
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
}
