"""Slices, positions and splits of a split dim: a rank gets the part of them that its block of the result has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, seconds_of
from shardwise.alternatives.exchange import block_of, by_exchange, named, plain_axes, plan_to, with_size
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord, on_mesh, run
from shardwise.layout import Layout, block_shape
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range, chunked, place_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _at(coord: Coord, layout: Layout, axes: tuple[int, ...]) -> int:
    return place_of(coord, axes, layout.axes)


class _Taken(NamedTuple):
    """A slice of a dim that is split: where it begins, its step and length, and what each rank has of the dim."""

    dim: int
    axes: tuple[int, ...]
    start: int
    step: int
    length: int
    every: tuple[Range, ...]

    def within(self, r: Range) -> Range:
        """The positions of the slice that lie in a range of the dim."""
        first, last = (min(max(-((self.start - e) // self.step), 0), self.length) for e in r)
        return first, last

    def to_slice(self, layout: Layout) -> Move:
        """What the dim has of the slice is cut anew."""
        wanted = tuple((r,) for r in chunked(self.length, self.axes, layout.axes))
        return Move(self.dim, self.axes, tuple((self.within(r),) for r in self.every), wanted)

    def cut(self, block: Tensor, place: int) -> Tensor:
        """What a rank's block of the whole has of the slice."""
        first, last = self.within(self.every[place])
        if last <= first:
            return block.narrow(self.dim, 0, 0)
        at = self.start + first * self.step - self.every[place][0]
        return block[self._there(at, last - first)]

    def _there(self, at: int, count: int) -> tuple[slice, ...]:
        whole = (slice(None),) * self.dim
        return (*whole, slice(at, at + (count - 1) * self.step + 1, self.step))

    def to_whole(self, layout: Layout) -> Move:
        """What is in the slice goes where the dim has it."""
        owned = tuple((r,) for r in chunked(self.length, self.axes, layout.axes))
        return Move(self.dim, self.axes, owned, tuple((self.within(r),) for r in self.every))

    def set_into(self, whole: Tensor, block: Tensor, place: int) -> Tensor:
        """The part of the slice that a rank got, set into its block of the whole."""
        mine = self.every[place]
        first, last = self.within(mine)
        if last > first:
            at = self.start + first * self.step - mine[0]
            whole[self._there(at, last - first)] = block
        return whole


def _taken(given: dict[str, Any], layout: Layout, n: int, count: int) -> _Taken | None:
    """The slice of a dim of size `n` in a tensor that lies so."""
    d = given["dim"] % layout.ndim
    axes = plain_axes(layout, d)
    if axes is None:
        return None
    step = given["step"]
    start = range(n)[given["start"] : given["end"] : step].start
    return _Taken(d, axes, start, step, count, chunked(n, axes, layout.axes))


def _slice(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """A slice of a split dim: a rank gives what it has of it, which is a range of the result."""
    if recipe is None:
        return None
    given = named(aten.slice.Tensor, args, kwargs)
    x: DTensor = given["self"]
    layout, d, out = x._spec.layout, given["dim"] % x.dim(), recipe.outputs[0]
    taken = _taken(given, layout, x.shape[d], out.shape[d])
    if taken is None:
        return None
    plan = plan_exchanges(layout, [taken.to_slice(layout)], x.dtype.itemsize)

    def before(coord: Coord, block: Tensor) -> Tensor:
        return taken.cut(block, _at(coord, layout, taken.axes))

    kept = with_size(layout, d, out.shape[d], taken.axes)
    return by_exchange(aten.slice.Tensor, plan, [out.with_layout(kept)], before=before)


def _slice_backward(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """The way back: a rank gets what lies in its range of the whole, and sets it into zeros."""
    if recipe is None:
        return None
    given = named(aten.slice_backward.default, args, kwargs)
    grad: DTensor = given["grad_output"]
    layout, out = grad._spec.layout, recipe.outputs[0]
    d = given["dim"] % grad.dim()
    taken = _taken(given, layout, out.shape[d], grad.shape[d])
    if taken is None:
        return None
    plan = plan_exchanges(layout, [taken.to_whole(layout)], grad.dtype.itemsize)
    kept = with_size(layout, d, out.shape[d], taken.axes)

    def after(coord: Coord, block: Tensor) -> Tensor:
        return taken.set_into(
            block.new_zeros(block_shape(kept, coord)), block, _at(coord, layout, taken.axes)
        )

    return by_exchange(aten.slice_backward.default, plan, [out.with_layout(kept)], after=after)


def _slice_scatter(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
    """The same, set into what a rank has."""
    if recipe is None:
        return None
    given = named(aten.slice_scatter.default, args, kwargs)
    x, src = given["self"], given["src"]
    if not isinstance(x, DTensor) or not isinstance(src, DTensor) or x.dtype != src.dtype:
        return None
    layout, d = x._spec.layout, given["dim"] % x.dim()
    taken = _taken(given, layout, x.shape[d], src.shape[d])
    if taken is None or any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    lie = with_size(layout, d, src.shape[d], taken.axes)
    first = plan_to(src, lie)
    plan = plan_exchanges(lie, [taken.to_whole(layout)], src.dtype.itemsize)
    spec = recipe.outputs[0].with_layout(layout)

    def local(coord: Coord, whole: Tensor, block: Tensor) -> Tensor:
        return taken.set_into(whole.clone(), block, _at(coord, layout, taken.axes))

    def go(*args: Any, **kwargs: Any) -> DTensor:
        given = named(aten.slice_scatter.default, args, kwargs)
        mind(aten.slice_scatter.default, [first, plan])
        block = run(plan, block_of(given["src"], first, spec.mesh), spec.mesh)
        return DTensor(on_mesh(spec.mesh, local, given["self"]._local_tensor, block), spec)

    return Offer(seconds_of([first, plan]), go, (spec,))


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
            out.with_layout(with_size(layout, d, n, axes))
            for out, n in zip(recipe.outputs, sizes, strict=True)
        ]
        return by_exchange(func, plan, specs, after=after, listed=True)

    return make


OFFERS: dict[Any, Maker] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.split.Tensor: _split(aten.split.Tensor),
    aten.split_with_sizes.default: _split(aten.split_with_sizes.default),
}
