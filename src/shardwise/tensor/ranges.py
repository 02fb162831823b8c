"""Ops along a split dim by exchanging ranges of it: a rank gets the positions that its block of the result is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Coord
from shardwise.comm import block_of as block_at
from shardwise.layout import Factor, Layout, Spec
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range, chunked, place_of
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.exchanged import by_exchange, fitted, named, plain_axes, plan_to
from shardwise.tensor.offer import Maker, Offer
from shardwise.tensor.prepare import Prepared

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
# For one dim: what a rank that owns a range does to its block first, and the positions of the result it then has.
_Before = tuple[Callable[[Tensor], Tensor], tuple[Range, ...]]


def _with_size(layout: Layout, d: int, size: int, axes: Sequence[int]) -> Layout:
    return layout.with_dim(d, Factor(size, tuple(axes)))


def _at(coord: Coord, layout: Layout, axes: Sequence[int]) -> int:
    return place_of(coord, axes, layout.axes)


def _rearranged(
    func: Any, x: DTensor, out: Spec, ways: dict[int, Callable[[Range], _Before]]
) -> Offer | None:
    """An offer for an op that puts positions elsewhere along some dims: `ways` says of a range where it goes."""
    layout = x._spec.layout
    cuts: dict[int, tuple[int, ...]] = {}
    moves = []
    for d, way in ways.items():
        axes = plain_axes(layout, d)
        if axes is None:
            return None
        cuts[d] = axes
        n, m = x.shape[d], out.shape[d]
        owned = tuple(way(r)[1] for r in chunked(n, axes, layout.axes))
        wanted = tuple((r,) for r in chunked(m, axes, layout.axes))
        moves.append(Move(d, axes, owned, wanted))
        layout = _with_size(layout, d, m, axes)
    source = x._spec.layout
    plan = plan_exchanges(source, moves, x.dtype.itemsize)

    def before(coord: Coord, block: Tensor) -> Tensor:
        for d, way in ways.items():
            mine = chunked(x_shape[d], cuts[d], source.axes)[_at(coord, source, cuts[d])]
            block = way(mine)[0](block)
        return block

    x_shape = tuple(x.shape)
    return by_exchange(func, plan, [out.with_layout(layout)], before=before)


def _slice(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A slice of a split dim: a rank gives what it has of it, which is a range of the result."""
    if recipe is None:
        return None
    given = named(aten.slice.Tensor, args, kwargs)
    x: DTensor = given["self"]
    d, out = given["dim"] % x.dim(), recipe.outputs[0]
    n, m, step = x.shape[d], out.shape[d], given["step"]
    start = range(n)[given["start"] : given["end"] : step].start

    def way(r: Range) -> _Before:
        first, last = (min(max(-((start - e) // step), 0), m) for e in r)
        at = start + first * step - r[0]
        return (
            lambda block: (
                block.narrow(d, at, (last - first - 1) * step + 1)[
                    (slice(None),) * d + (slice(None, None, step),)
                ]
                if last > first
                else block.narrow(d, 0, 0)
            )
        ), ((first, last),)

    return _rearranged(aten.slice.Tensor, x, out, {d: way})


def _slice_backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """The way back: a rank gets what lies in its range of the whole, and sets it into zeros."""
    if recipe is None:
        return None
    given = named(aten.slice_backward.default, args, kwargs)
    grad: DTensor = given["grad_output"]
    layout, out = grad._spec.layout, recipe.outputs[0]
    d, step = given["dim"] % grad.dim(), given["step"]
    axes = plain_axes(layout, d)
    if axes is None:
        return None
    n, m = out.shape[d], grad.shape[d]
    start = range(n)[given["start"] : given["end"] : step].start

    def within(r: Range) -> Range:
        """The positions of the slice that lie in a range of the whole."""
        first, last = (min(max(-((start - e) // step), 0), m) for e in r)
        return first, last

    every = chunked(n, axes, layout.axes)
    owned = tuple((r,) for r in chunked(m, axes, layout.axes))
    plan = plan_exchanges(
        layout, [Move(d, axes, owned, tuple((within(r),) for r in every))], grad.dtype.itemsize
    )

    def after(coord: Coord, block: Tensor) -> Tensor:
        mine = every[_at(coord, layout, axes)]
        first, last = within(mine)
        shape = list(block.shape)
        shape[d] = mine[1] - mine[0]
        whole = block.new_zeros(shape)
        if last > first:
            at = start + first * step - mine[0]
            whole[(slice(None),) * d + (slice(at, at + (last - first - 1) * step + 1, step),)] = block
        return whole

    return by_exchange(
        aten.slice_backward.default, plan, [out.with_layout(_with_size(layout, d, n, axes))], after=after
    )


def _select(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """One position of a split dim: all want it, and only its owner sends."""
    if recipe is None:
        return None
    given = named(aten.select.int, args, kwargs)
    x: DTensor = given["self"]
    layout, d = x._spec.layout, given["dim"] % x.dim()
    axes = plain_axes(layout, d)
    if axes is None:
        return None
    i = given["index"] % x.shape[d]
    owned = tuple((r,) for r in chunked(x.shape[d], axes, layout.axes))
    plan = plan_exchanges(layout, [Move(d, axes, owned, (((i, i + 1),),) * len(owned))], x.dtype.itemsize)
    kept = layout.with_dims([dim for e, dim in enumerate(layout.dims) if e != d])
    return by_exchange(
        aten.select.int,
        plan,
        [recipe.outputs[0].with_layout(kept)],
        after=lambda coord, block: block.squeeze(d),
    )


def _split(func: Any) -> Maker:
    """Several parts of a split dim at once, each cut anew."""

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        if recipe is None:
            return None
        given = named(func, args, kwargs)
        x: DTensor = given["self"]
        layout, d = x._spec.layout, given["dim"] % x.dim()
        axes = plain_axes(layout, d)
        if axes is None:
            return None
        sizes = [out.shape[d] for out in recipe.outputs]
        cuts = [chunked(size, axes, layout.axes) for size in sizes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        owned = tuple((r,) for r in chunked(x.shape[d], axes, layout.axes))
        wanted = tuple(
            tuple((s + c[i][0], s + c[i][1]) for s, c in zip(starts, cuts, strict=True))
            for i in range(len(owned))
        )
        plan = plan_exchanges(layout, [Move(d, axes, owned, wanted)], x.dtype.itemsize)

        def after(coord: Coord, block: Tensor) -> list[Tensor]:
            here = _at(coord, layout, axes)
            return list(block.split([c[here][1] - c[here][0] for c in cuts], d))

        specs = [
            out.with_layout(_with_size(layout, d, n, axes))
            for out, n in zip(recipe.outputs, sizes, strict=True)
        ]
        return by_exchange(func, plan, specs, after=after, listed=True)

    return make


def _roll(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A ring turned: a rank's range becomes another, or two where it goes round the end."""
    if recipe is None:
        return None
    given = named(aten.roll.default, args, kwargs)
    x: DTensor = given["self"]
    shifts, dims = given["shifts"], given["dims"]
    if not dims:
        return None  # of the tensor flattened
    turned: dict[int, int] = {}
    for d, shift in zip(dims, shifts, strict=True):
        turned[d % x.dim()] = turned.get(d % x.dim(), 0) + shift

    def way(n: int, shift: int) -> Callable[[Range], _Before]:
        def to(r: Range) -> _Before:
            low, length = (r[0] + shift) % max(n, 1), r[1] - r[0]
            first = min(length, n - low)
            ranges = ((low, low + first), (0, length - first)) if length > first else ((low, low + length),)
            return (lambda block: block), ranges

        return to

    ways = {d: way(x.shape[d], shift) for d, shift in turned.items()}
    return _rearranged(aten.roll.default, x, recipe.outputs[0], ways)


def _flip(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    if recipe is None:
        return None
    given = named(aten.flip.default, args, kwargs)
    x: DTensor = given["self"]

    def way(d: int) -> Callable[[Range], _Before]:
        n = x.shape[d]
        return lambda r: ((lambda block: block.flip(d)), ((n - r[1], n - r[0]),))

    return _rearranged(
        aten.flip.default, x, recipe.outputs[0], {d % x.dim(): way(d % x.dim()) for d in given["dims"]}
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
        layout = _with_size(layout, d, m, axes)

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
    lie = {i: _with_size(layout, d, tensors[i].shape[d], axes) for i in there}
    first = [plan_to(t, lie[i]) if i in lie else None for i, t in enumerate(tensors)]
    sizes = [tensors[i].shape[d] for i in there]
    cuts = [chunked(size, axes, layout.axes) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wanted = tuple((r,) for r in chunked(out.shape[d], axes, layout.axes))
    owned = tuple(
        tuple((s + c[i][0], s + c[i][1]) for s, c in zip(starts, cuts, strict=True))
        for i in range(len(wanted))
    )
    after = _with_size(layout, d, out.shape[d], axes)
    plan = plan_exchanges(after, [Move(d, axes, owned, wanted)], out.dtype.itemsize)

    def before(coord: Coord, *blocks: Tensor) -> Tensor:
        return torch.cat([block_at(blocks[i], lie[i], coord) if is_plain[i] else blocks[i] for i in there], d)

    return by_exchange(aten.cat.default, plan, [out.with_layout(after)], first=first, before=before)


def _unfold(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """Windows along a split dim: a rank gets what its windows cover."""
    if recipe is None:
        return None
    given = named(aten.unfold.default, args, kwargs)
    x: DTensor = given["self"]
    layout, out = x._spec.layout, recipe.outputs[0]
    d, size, step = given["dimension"] % max(x.dim(), 1), given["size"], given["step"]
    axes = plain_axes(layout, d) if x.dim() else None
    if axes is None or size == 0:
        return None
    window = Window(size, step)
    owned = tuple((r,) for r in chunked(x.shape[d], axes, layout.axes))
    wanted = tuple((window.covered(r),) for r in chunked(out.shape[d], axes, layout.axes))
    plan = plan_exchanges(layout, [Move(d, axes, owned, wanted)], x.dtype.itemsize)

    def after(coord: Coord, block: Tensor) -> Tensor:
        if block.shape[d]:
            return block.unfold(d, size, step)
        return block.new_empty(*block.shape, size)

    kept = _with_size(layout, d, out.shape[d], axes)
    return by_exchange(
        aten.unfold.default,
        plan,
        [out.with_layout(kept.with_dims([*kept.dims, (Factor(size),)]))],
        after=after,
    )


def _unfold_backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """The way back: a rank gets the windows that touch its range, adds them up, and keeps its range."""
    if recipe is None:
        return None
    given = named(aten.unfold_backward.default, args, kwargs)
    grad: DTensor = given["grad_in"]
    layout, out = grad._spec.layout, recipe.outputs[0]
    if not out.shape or any(f.axes for f in layout.dims[-1]):
        return None
    d, size, step = given["dim"] % len(out.shape), given["size"], given["step"]
    axes = plain_axes(layout, d)
    if axes is None or size == 0:
        return None
    window, every = Window(size, step), chunked(out.shape[d], axes, layout.axes)
    owned = tuple((r,) for r in chunked(grad.shape[d], axes, layout.axes))
    touching = [window.touching(r, grad.shape[d]) for r in every]
    plan = plan_exchanges(layout, [Move(d, axes, owned, tuple((r,) for r in touching))], grad.dtype.itemsize)

    def after(coord: Coord, block: Tensor) -> Tensor:
        here = _at(coord, layout, axes)
        (low, high), (a, b) = every[here], window.covered(touching[here])
        shape = list(block.shape[:-1])
        shape[d] = b - a
        whole = aten.unfold_backward.default(block, shape, d, size, step) if b > a else block.new_zeros(shape)
        return fitted(whole, d, (a, b), (low, high))

    kept = _with_size(layout, d, out.shape[d], axes)
    return by_exchange(
        aten.unfold_backward.default, plan, [out.with_layout(kept.with_dims(kept.dims[:-1]))], after=after
    )


OFFERS: dict[Any, Maker] = {
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.select.int: _select,
    aten.split.Tensor: _split(aten.split.Tensor),
    aten.split_with_sizes.default: _split(aten.split_with_sizes.default),
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
}
