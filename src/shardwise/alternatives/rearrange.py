"""Ops that put positions of a split dim elsewhere: a rank gets the ranges that its block of the result is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer
from shardwise.alternatives.exchange import by_exchange, named, plain_axes, plan_to, with_size
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord
from shardwise.comm import block_of as block_at
from shardwise.layout import Layout, Spec
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range, Ranges, chunked, place_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Goes = Callable[[Range], Ranges]  # where a range of a dim is in the result


def _at(coord: Coord, layout: Layout, axes: tuple[int, ...]) -> int:
    return place_of(coord, axes, layout.axes)


def _rearranged(
    func: Any, x: DTensor, out: Spec, goes: dict[int, _Goes], before: Callable[..., Tensor] | None = None
) -> Offer | None:
    """An offer for an op that puts ranges of some dims elsewhere, after what it does to each block by itself."""
    layout = x._spec.layout
    moves = []
    for d, to in goes.items():
        axes = plain_axes(layout, d)
        if axes is None:
            return None
        ranges = chunked(x.shape[d], axes, layout.axes)
        moves.append(Move(d, axes, tuple(map(to, ranges)), tuple((r,) for r in ranges)))
    plan = plan_exchanges(layout, moves, x.dtype.itemsize)
    return by_exchange(func, plan, [out.with_layout(layout)], before=before)


def _roll(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A ring turned: a rank's range becomes another, or two where it goes round the end."""
    if recipe is None:
        return None
    given = named(aten.roll.default, args, kwargs)
    x: DTensor = given["self"]
    turned: dict[int, int] = {}
    for d, shift in zip(given["dims"], given["shifts"], strict=False):
        turned[d % x.dim()] = turned.get(d % x.dim(), 0) + shift

    def way(n: int, shift: int) -> _Goes:
        def to(r: Range) -> Ranges:
            low, length = (r[0] + shift) % max(n, 1), r[1] - r[0]
            first = min(length, n - low)
            return ((low, low + first), (0, length - first)) if length > first else ((low, low + length),)

        return to

    if not turned:
        return None  # of the tensor flattened
    ways = {d: way(x.shape[d], shift) for d, shift in turned.items()}
    return _rearranged(aten.roll.default, x, recipe.outputs[0], ways)


def _flip(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A rank flips its block, which is then the range from the other end."""
    if recipe is None:
        return None
    given = named(aten.flip.default, args, kwargs)
    x: DTensor = given["self"]
    dims = [d % x.dim() for d in given["dims"]]

    def way(n: int) -> _Goes:
        return lambda r: ((n - r[1], n - r[0]),)

    return _rearranged(
        aten.flip.default,
        x,
        recipe.outputs[0],
        {d: way(x.shape[d]) for d in dims},
        before=lambda coord, block: block.flip(dims),
    )


def _pad(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Ranges shift by the padding, and those at the ends pad what they get; negative padding cuts off."""
    if recipe is None:
        return None
    given = named(aten.constant_pad_nd.default, args, kwargs)
    x: DTensor = given["self"]
    source, layout, out = x._spec.layout, x._spec.layout, recipe.outputs[0]
    if source.partial and given["value"] != 0:
        return None
    value = given["value"]
    pads = {x.dim() - 1 - i // 2: given["pad"][i : i + 2] for i in range(0, len(given["pad"]), 2)}
    moves, cuts = [], {}
    for d, (left, _) in pads.items():
        axes = plain_axes(layout, d)
        if axes is None:
            return None
        n, m = x.shape[d], out.shape[d]
        low, high = max(left, 0), min(left + n, m)  # where the tensor lies in the result
        shifted = [_clamped((a + left, b + left), low, high) for a, b in chunked(n, axes, layout.axes)]
        wanted = [_clamped(r, low, high) for r in chunked(m, axes, layout.axes)]
        moves.append(Move(d, axes, tuple((r,) for r in shifted), tuple((r,) for r in wanted)))
        cuts[d] = (axes, chunked(n, axes, layout.axes), shifted, chunked(m, axes, layout.axes), wanted)
        layout = with_size(layout, d, m, axes)

    def before(coord: Coord, block: Tensor) -> Tensor:
        for d, (axes, ours, shifted, *_) in cuts.items():
            here = _at(coord, source, axes)
            (low, high), left = shifted[here], pads[d][0]
            block = block.narrow(d, low - left - ours[here][0] if high > low else 0, high - low)
        return block

    def after(coord: Coord, block: Tensor) -> Tensor:
        amounts = [0] * (2 * block.dim())
        for d, (axes, _, _, mine, wanted) in cuts.items():
            here = _at(coord, source, axes)
            (a, b), (low, high) = mine[here], wanted[here]
            at = 2 * (block.dim() - 1 - d)
            amounts[at : at + 2] = [low - a, b - high] if high > low else [b - a, 0]
        return aten.constant_pad_nd.default(block, amounts, value)  # type: ignore[no-any-return]

    plan = plan_exchanges(source, moves, x.dtype.itemsize)
    return by_exchange(
        aten.constant_pad_nd.default, plan, [out.with_layout(layout)], before=before, after=after
    )


def _clamped(r: Range, low: int, high: int) -> Range:
    first = min(max(r[0], low), max(high, low))
    return first, max(min(r[1], high), first)


def _cat(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Blocks put together on the spot are ranges of the result, which then go where they belong."""
    if recipe is None:
        return None
    given, out = named(aten.cat.default, args, kwargs), recipe.outputs[0]
    d, tensors = given["dim"] % len(out.shape), given["tensors"]
    # empty ones of one dim are let pass
    there = [i for i, t in enumerate(tensors) if t.dim() == len(out.shape)]
    lead = max(
        (t for t in (tensors[i] for i in there) if isinstance(t, DTensor) and plain_axes(t._spec.layout, d)),
        key=lambda t: t.numel(),
        default=None,
    )
    if lead is None or any(t.dtype != out.dtype for t in tensors):
        return None
    layout = lead._spec.layout
    axes = plain_axes(layout, d) or ()
    is_plain = [not isinstance(t, DTensor) for t in tensors]
    if any(op not in ("sum", "avg") for _, op in layout.partial) or (layout.partial and any(is_plain)):
        return None
    lie = {i: with_size(layout, d, tensors[i].shape[d], axes) for i in there}
    first = [plan_to(t, lie[i]) if i in lie else None for i, t in enumerate(tensors)]
    sizes = [tensors[i].shape[d] for i in there]
    cuts = [chunked(size, axes, layout.axes) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wanted = tuple((r,) for r in chunked(out.shape[d], axes, layout.axes))
    owned = tuple(
        tuple((s + c[i][0], s + c[i][1]) for s, c in zip(starts, cuts, strict=True))
        for i in range(len(wanted))
    )
    after = with_size(layout, d, out.shape[d], axes)
    plan = plan_exchanges(after, [Move(d, axes, owned, wanted)], out.dtype.itemsize)

    def before(coord: Coord, *blocks: Tensor) -> Tensor:
        return torch.cat([block_at(blocks[i], lie[i], coord) if is_plain[i] else blocks[i] for i in there], d)

    return by_exchange(aten.cat.default, plan, [out.with_layout(after)], first=first, before=before)


OFFERS: dict[Any, Maker] = {
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
}
