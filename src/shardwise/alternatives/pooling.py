"""Pools over split positions: ranks exchange the halos of their blocks, not the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, seconds_of
from shardwise.alternatives.exchange import block_of, named, plan_to
from shardwise.alternatives.halo import Halo, halos_of, recut
from shardwise.call.resolve import Prepared
from shardwise.comm import Coord, on_mesh, run
from shardwise.layout import Layout, block_shape
from shardwise.plan import plan_exchanges
from shardwise.plan.exchange import Range
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["OFFERS"]

aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class _Pool(NamedTuple):
    """A pool over the last dims of a tensor: the windows, how many positions there are, and which dims are split."""

    windows: tuple[Window, ...]
    sizes: tuple[int, ...]
    halos: tuple[Halo | None, ...]
    ceil: bool

    @property
    def split(self) -> list[Halo]:
        return [h for h in self.halos if h is not None]

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Kernel, stride and padding for blocks with their halos: nothing is padded where it was split."""
        pairs = list(zip(self.windows, self.halos, strict=True))
        padding = [w.padding if h is None else 0 for w, h in pairs]
        return [w.size for w, _ in pairs], [w.stride for w, _ in pairs], padding

    @property
    def dilation(self) -> list[int]:
        return [w.dilation for w in self.windows]


def _pool(nd: int, given: dict[str, Any], layout: Layout, into: Any, out: Any) -> _Pool | None:
    """The pool of a call whose positions lie so, or None if there are no halos to exchange."""

    def each(value: Any, default: list[int]) -> list[int]:
        listed = list(value) if isinstance(value, list | tuple) else [value]
        return (listed * nd if len(listed) == 1 else listed) or default

    kernel = each(given["kernel_size"], [])
    numbers = kernel, each(given["stride"], kernel), each(given["padding"], [])
    windows = tuple(Window(*w) for w in zip(*numbers, each(given.get("dilation", 1), []), strict=True))
    halos = halos_of(layout, windows, into[-nd:], out[-nd:])
    if halos is None or 0 in into or 0 in out:
        return None
    split = {h.dim - (layout.ndim - nd): h for h in halos}
    return _Pool(windows, tuple(into[-nd:]), tuple(split.get(i) for i in range(nd)), given["ceil_mode"])


def _sums_only(layout: Layout) -> Layout:
    """A layout in which only sums are pending: a mean of positions is linear."""
    return layout.with_partial({a: op for a, op in layout.partial if op in ("sum", "avg")})


class _Divisors(NamedTuple):
    """What the sum of each window is divided by: along each dim how many positions count, or one number for all."""

    counts: tuple[tuple[int, ...], ...]
    alike: int | None

    def of(self, block: Tensor, ranges: Sequence[Range | None]) -> Tensor:
        """A block of sums, or of their gradients, divided; along split dims it has these ranges of the windows."""
        if self.alike is not None:
            return block  # the kernel divides
        for i, (counts, r) in enumerate(zip(self.counts, ranges, strict=True)):
            some = counts if r is None else counts[r[0] : r[1]]
            shape = [-1] + [1] * (len(self.counts) - 1 - i)
            block = block / torch.tensor(some, dtype=block.dtype, device=block.device).view(shape)
        return block


def _divisors(pool: _Pool, given: dict[str, Any], out: Sequence[int]) -> _Divisors:
    counts = []
    for w, n, m in zip(pool.windows, pool.sizes, out[-len(pool.sizes) :], strict=True):
        ends = [(i * w.stride - w.padding, i * w.stride - w.padding + w.size) for i in range(m)]
        if given["count_include_pad"]:
            counts.append(tuple(min(b, n + w.padding) - a for a, b in ends))
        else:
            counts.append(tuple(min(b, n) - max(a, 0) for a, b in ends))
    one = math.prod(c[0] for c in counts) if all(len(set(c)) == 1 for c in counts) else None
    return _Divisors(tuple(counts), given["divisor_override"] or one)


def _is_exact(x: DTensor, divisors: _Divisors) -> bool:
    """In a narrow dtype a sum would be rounded before it is divided; integers are divided otherwise."""
    if divisors.alike is not None:
        return x.dtype.is_floating_point
    return x.dtype in (torch.float32, torch.float64)


def _average(func: Any, nd: int) -> Maker:
    """A mean over windows: sums, divided by what the window counts in the whole."""

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        x: DTensor = given["self"]
        if recipe is None:
            return None
        layout, made = _sums_only(x._spec.layout), recipe.outputs[0]
        pool = _pool(nd, given, layout, x.shape, made.shape)
        if pool is None:
            return None
        by = _divisors(pool, given, made.shape)
        if not _is_exact(x, by):
            return None
        out = recut(layout, made.shape[-nd:])
        first, spec = plan_to(x, layout), made.with_layout(out)
        plan = plan_exchanges(layout, [h.to_windows() for h in pool.split], x.dtype.itemsize)

        def local(coord: Coord, x: Tensor) -> Tensor:
            shape = block_shape(out, coord)
            if 0 in shape:
                return x.new_empty(shape)
            for h in pool.split:
                x = h.filled(coord, x)
            y = func(x, *pool.numbers, pool.ceil, True, by.alike or 1)
            return by.of(y, [None if h is None else h.windows[h.place(coord)] for h in pool.halos])

        def go(*args: Any, **kwargs: Any) -> DTensor:
            mind(func, [first, plan])
            x = block_of(named(func, args, kwargs)["self"], first, spec.mesh)
            return DTensor(on_mesh(spec.mesh, local, run(plan, x, spec.mesh)), spec)

        return Offer(seconds_of([first, plan]), go, (spec,))

    return make


def _average_backward(func: Any, nd: int) -> Maker:
    """A rank gets the windows that touch its positions."""

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        grad, x = given["grad_output"], given["self"]
        if recipe is None or not isinstance(x, DTensor) or not isinstance(grad, DTensor):
            return None
        layout, made = x._spec.layout.with_partial({}), recipe.outputs[0]
        pool = _pool(nd, given, layout, x.shape, grad.shape)
        if pool is None:
            return None
        by = _divisors(pool, given, grad.shape)
        if not _is_exact(grad, by):
            return None
        out = recut(layout, grad.shape[-nd:])
        first, spec = plan_to(grad, out), made.with_layout(layout)
        plan = plan_exchanges(out, [h.to_positions() for h in pool.split], grad.dtype.itemsize)

        def local(coord: Coord, grad: Tensor) -> Tensor:
            shape = block_shape(layout, coord)
            if 0 in grad.shape or 0 in shape:
                return grad.new_zeros(shape)
            wide = list(shape)
            for h in pool.split:
                low, high = h.touched(coord)[1]
                wide[h.dim] = high - low
            near = [None if h is None else h.near(coord) for h in pool.halos]
            like = grad.new_empty(wide)  # of which only the shape is read
            into: Tensor = func(by.of(grad, near), like, *pool.numbers, pool.ceil, True, by.alike or 1)
            for h in pool.split:
                into = h.kept(coord, into)
            return into

        def go(*args: Any, **kwargs: Any) -> DTensor:
            mind(func, [first, plan])
            grad = block_of(named(func, args, kwargs)["grad_output"], first, spec.mesh)
            return DTensor(on_mesh(spec.mesh, local, run(plan, grad, spec.mesh)), spec)

        return Offer(seconds_of([first, plan]), go, (spec,))

    return make


def _places(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The position along each dim of an index into them all."""
    out: list[Tensor] = []
    for n in reversed(sizes):
        out.insert(0, index % n)
        index = index // n
    return out


def _index(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    index = places[0]
    for place, n in zip(places[1:], sizes[1:], strict=True):
        index = index * n + place
    return index


def _maximum(func: Any, nd: int) -> Maker:
    """A maximum over windows, and where it is in the whole."""

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        x: DTensor = given["self"]
        if recipe is None or not x.dtype.is_floating_point:
            return None
        layout, made = x._spec.layout.with_partial({}), recipe.outputs
        pool = _pool(nd, given, layout, x.shape, made[0].shape)
        if pool is None:
            return None
        out = recut(layout, made[0].shape[-nd:])
        first, specs = plan_to(x, layout), tuple(m.with_layout(out) for m in made)
        plan = plan_exchanges(layout, [h.to_windows() for h in pool.split], x.dtype.itemsize)

        def local(coord: Coord, x: Tensor) -> list[Tensor]:
            shape = block_shape(out, coord)
            if 0 in shape:
                return [x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)]
            for h in pool.split:
                x = h.filled(coord, x, -math.inf)
            top, at = func(x, *pool.numbers, pool.dilation, pool.ceil)
            places = _places(at, x.shape[-nd:])
            for i, halo in enumerate(pool.halos):
                if halo is not None:
                    places[i] = _in_the_whole(places[i], halo, coord)
            return [top, _index(places, pool.sizes)]

        mesh = recipe.mesh

        def go(*args: Any, **kwargs: Any) -> tuple[DTensor, ...]:
            mind(func, [first, plan])
            x = block_of(named(func, args, kwargs)["self"], first, mesh)
            made = on_mesh(mesh, local, run(plan, x, mesh))
            return tuple(DTensor(b, spec) for b, spec in zip(made, specs, strict=True))

        return Offer(seconds_of([first, plan]), go, specs)

    return make


def _in_the_whole(place: Tensor, h: Halo, coord: Coord) -> Tensor:
    """A position in a filled block as one in the whole.

    What was filled in wins only where all is as low; then the kernel says the first position that there is.
    """
    place = place + h.covered(coord)[0][0]
    step = h.window.dilation
    return torch.where(place < 0, place % step, place) if step > 1 else place.clamp(min=0)


def _maximum_backward(func: Any, nd: int) -> Maker:
    """A rank gets the windows that touch its positions, and keeps what has its maximum there."""

    def make(args: _Args, kwargs: _Kwargs, recipe: Prepared | None) -> Offer | None:
        given = named(func, args, kwargs)
        grad, x, indices = given["grad_output"], given["self"], given["indices"]
        if recipe is None or not all(isinstance(t, DTensor) for t in (grad, x, indices)):
            return None
        layout, made = x._spec.layout.with_partial({}), recipe.outputs[0]
        pool = _pool(nd, given, layout, x.shape, grad.shape)
        if pool is None:
            return None
        out = recut(layout, grad.shape[-nd:])
        moves, spec = [h.to_positions() for h in pool.split], made.with_layout(layout)
        first = [plan_to(grad, out), plan_to(indices, out)]
        then = [plan_exchanges(out, moves, t.dtype.itemsize) for t in (grad, indices)]

        def local(coord: Coord, grad: Tensor, indices: Tensor) -> Tensor:
            shape = block_shape(layout, coord)
            into = grad.new_zeros(shape)
            if 0 in grad.shape or 0 in shape:
                return into
            places = _places(indices, pool.sizes)
            here = torch.ones_like(indices, dtype=torch.bool)
            for i, h in enumerate(pool.halos):
                if h is not None:
                    low, high = h.positions[h.place(coord)]
                    here &= (places[i] >= low) & (places[i] < high)
                    places[i] = places[i] - low
            at = _index(places, shape[-nd:]).masked_fill(~here, 0)
            into.flatten(-nd).scatter_add_(-1, at.flatten(-nd), grad.masked_fill(~here, 0).flatten(-nd))
            return into

        def go(*args: Any, **kwargs: Any) -> DTensor:
            mind(func, [*first, *then])
            given = named(func, args, kwargs)
            pairs = zip((given["grad_output"], given["indices"]), first, then, strict=True)
            blocks = [run(b, block_of(t, a, spec.mesh), spec.mesh) for t, a, b in pairs]
            return DTensor(on_mesh(spec.mesh, local, *blocks), spec)

        return Offer(seconds_of([*first, *then]), go, (spec,))

    return make


_MAKERS: dict[str, Callable[[Any, int], Maker]] = {
    "avg_pool#d": _average,
    "avg_pool#d_backward": _average_backward,
    "max_pool#d_with_indices": _maximum,
    "max_pool#d_with_indices_backward": _maximum_backward,
}


def _offers() -> dict[Any, Maker]:
    out: dict[Any, Maker] = {}
    for name, make in _MAKERS.items():
        for nd in (2, 3):
            op = getattr(aten, name.replace("#", str(nd))).default
            out[op] = make(op, nd)
    return out


OFFERS: dict[Any, Maker] = _offers()
