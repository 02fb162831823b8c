"""Positions taken from others of a split dim by a fixed map: nearest resampling, and padding by what is there.

A rank gets the range that its part of the result is taken from; on the way back, the range of what took from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer
from shardwise.alternatives.exchange import by_exchange, named, plain_axes
from shardwise.alternatives.halo import recut
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord
from shardwise.layout import Axes, Layout
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range, chunked, place_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class _Map(NamedTuple):
    """Along one dim: where each position of the result is taken from, and who has what of either."""

    dim: int
    axes: tuple[int, ...]
    source: tuple[int, ...]
    had: tuple[Range, ...]
    made: tuple[Range, ...]

    def taken(self, place: int) -> Range:
        """The range that a rank's part of the result is taken from."""
        low, high = self.made[place]
        some = self.source[low:high]
        return (min(some), max(some) + 1) if some else (0, 0)

    def takers(self, place: int) -> Range:
        """The range of the result in which something is taken from what a rank has."""
        low, high = self.had[place]
        some = [o for o, i in enumerate(self.source) if low <= i < high]
        return (some[0], some[-1] + 1) if some else (0, 0)

    def forward(self) -> Move:
        wanted = tuple((self.taken(p),) for p in range(len(self.made)))
        return Move(self.dim, self.axes, tuple((r,) for r in self.had), wanted)

    def backward(self) -> Move:
        wanted = tuple((self.takers(p),) for p in range(len(self.had)))
        return Move(self.dim, self.axes, tuple((r,) for r in self.made), wanted)

    def take(self, block: Tensor, place: int) -> Tensor:
        """A rank's part of the result, from the range it is taken from."""
        (low, high), start = self.made[place], self.taken(place)[0]
        at = torch.tensor([i - start for i in self.source[low:high]], dtype=torch.int64, device=block.device)
        return block.index_select(self.dim, at)

    def add_up(self, block: Tensor, place: int) -> Tensor:
        """The gradient of what a rank has, from that of the range in which something is taken from it."""
        (low, high), (first, last) = self.had[place], self.takers(place)
        pairs = [
            (o - first, self.source[o] - low) for o in range(first, last) if low <= self.source[o] < high
        ]
        shape = list(block.shape)
        shape[self.dim] = high - low
        out = block.new_zeros(shape)
        if pairs:
            rows, at = torch.tensor(pairs, dtype=torch.int64, device=block.device).unbind(1)
            out.index_add_(self.dim, at, block.index_select(self.dim, rows))
        return out


def _source(family: str, n: int, m: int, option: Any, dtype: torch.dtype) -> tuple[int, ...]:
    """Where the op takes each position from, as it says itself of the numbers of the positions."""
    line = torch.arange(n, dtype=dtype).view(1, 1, n)
    op = getattr(aten, f"{family}1d").default
    made = op(line, [m], option) if "upsample" in family else op(line, option)
    return tuple(int(i) for i in made.flatten().tolist())


def _options(family: str, nd: int, given: dict[str, Any]) -> list[Any]:
    """What the op is told along each dim: its scale, or how much it pads."""
    if "upsample" in family:
        names = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}[nd]
        return [given[name] for name in names]
    pad = given["padding"]
    return [pad[2 * (nd - 1 - i) : 2 * (nd - i)] for i in range(nd)]


def _maps(
    family: str,
    nd: int,
    given: dict[str, Any],
    layout: Layout,
    into: Sequence[int],
    out: Sequence[int],
    dtype: Any,
) -> list[_Map] | None:
    """The maps of all dims, or None if none of them is split, one not plainly, or the dtype cannot count that far."""
    if dtype not in (torch.float32, torch.float64) or 0 in into or 0 in out or max(into) > 2**24:
        return None
    maps = []
    for i, option in enumerate(_options(family, nd, given)):
        d = layout.ndim - nd + i
        axes = plain_axes(layout, d)
        if axes is None:
            return None
        source = _source(family, into[d], out[d], option, dtype)
        on: Axes = layout.axes
        maps.append(_Map(d, axes, source, chunked(into[d], axes, on), chunked(out[d], axes, on)))
    return maps if any(m.axes for m in maps) else None


def _forward(family: str, nd: int) -> Maker:
    func = getattr(aten, f"{family}{nd}d").default

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        x: DTensor = given["self"]
        if recipe is None:
            return None
        layout, made = x._spec.layout, recipe.outputs[0]
        maps = _maps(family, nd, given, layout, x.shape, made.shape, x.dtype)
        if maps is None:
            return None
        plan = plan_exchanges(layout, [m.forward() for m in maps], x.dtype.itemsize)

        def after(coord: Coord, block: Tensor) -> Tensor:
            for m in maps:
                block = m.take(block, place_of(coord, m.axes, layout.axes))
            return block

        return by_exchange(func, plan, [made.with_layout(recut(layout, made.shape[-nd:]))], after=after)

    return make


def _backward(family: str, nd: int) -> Maker:
    func = getattr(aten, f"{family}{nd}d_backward").default

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        grad: Any = given["grad_output"]
        if recipe is None or not isinstance(grad, DTensor):
            return None
        made = recipe.outputs[0]
        # the gradient lies as the result did, and what went in is cut by the same axes
        out = grad._spec.layout
        layout = recut(out, made.shape[-nd:]) if _is_plain(out, nd) else None
        maps = None if layout is None else _maps(family, nd, given, out, made.shape, grad.shape, grad.dtype)
        if layout is None or maps is None or any(op not in ("sum", "avg") for _, op in out.partial):
            return None
        plan = plan_exchanges(out, [m.backward() for m in maps], grad.dtype.itemsize)

        def after(coord: Coord, block: Tensor) -> Tensor:
            for m in maps:
                block = m.add_up(block, place_of(coord, m.axes, out.axes))
            return block

        return by_exchange(func, plan, [made.with_layout(layout)], after=after)

    return make


def _is_plain(layout: Layout, nd: int) -> bool:
    return all(plain_axes(layout, layout.ndim - nd + i) is not None for i in range(nd))


_FAMILIES = ("upsample_nearest", "_upsample_nearest_exact", "reflection_pad", "replication_pad")

OFFERS: dict[Any, Maker] = {
    getattr(aten, f"{family}{nd}d{way}").default: make(family, nd)
    for family in _FAMILIES
    for nd in (1, 2, 3)
    for way, make in (("", _forward), ("_backward", _backward))
}
