"""Hypothesis strategies for mesh axes, shapes, placements and layouts, with all corner cases.

These are: axes of size 1, dims of size 0 and 1, uneven splits and empty blocks, several axes on a dim in any order, dims
of several factors, and pending reductions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shardwise.layout import REDUCE_OPS, Axes, Factor, Layout, Partial, Placement, Replicate, Shard

many = settings(max_examples=3 * settings.default.max_examples)
"""For properties of layouts alone, which are cheap to check and fail for combinations of corner cases."""

NAMES = ("dp", "tp", "cp", "pp", "ep_2", "x")

Draw = st.DrawFn
Writing = list[list[Factor]]
"""The dims of a layout in any of the equivalent ways to write them, not only the canonical one."""


@st.composite
def axes(draw: Draw, *, most: int = 3, max_size: int = 4, max_count: int = 64) -> Axes:
    """1 to `most` axes of sizes 1 to `max_size`, at most `max_count` ranks in all, with names or without."""
    sizes: list[int] = []
    for _ in range(draw(st.sampled_from([2, 1, 3][:most]))):
        room = min(max_size, max_count // math.prod(sizes))
        sizes.append(draw(_often(range(2, room + 1), seldom=[1])))
    names = draw(st.permutations(NAMES)) if draw(st.booleans()) else ()
    return Axes(tuple(sizes), tuple(names[: len(sizes)]))


_any_axes = axes  # the strategies below take the axes as an argument of that name


@st.composite
def shapes(draw: Draw, *, max_dims: int = 4, min_size: int = 0, max_size: int = 13) -> tuple[int, ...]:
    """Shapes of 0 to `max_dims` dims."""
    ndim = draw(_often(range(1, max_dims + 1), seldom=[0]))
    size = _often(range(2, max_size + 1), seldom=range(min_size, 2))
    return tuple(draw(size) for _ in range(ndim))


def _often(common: Sequence[int], *, seldom: Sequence[int]) -> st.SearchStrategy[int]:
    # Hypothesis prefers 0 and 1, so by default most tensors would be empty and most meshes have one rank.
    return st.sampled_from([*common, *common, *common, *seldom] if len(common) < 5 else [*common, *seldom])


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def factorings(draw: Draw, n: int) -> tuple[int, ...]:
    """Sizes that multiply to `n`, at least one of them; 1 may be among them."""
    if n == 0:
        return draw(st.sampled_from([(0,), (0, 3), (2, 0), (0, 0)]))
    out = []
    while n > 1 and draw(st.booleans()):
        d = draw(st.sampled_from(divisors(n)))
        out.append(d)
        n //= d
    return (*out, n) if n > 1 or not out or draw(st.booleans()) else tuple(out)


def pending(count: int) -> st.SearchStrategy[list[str]]:
    """The reductions of `count` Partial axes of one tensor: all the same, or sum and avg mixed."""
    same = st.sampled_from(REDUCE_OPS).map(lambda op: [op] * count)
    return same | st.lists(st.sampled_from(["sum", "avg"]), min_size=count, max_size=count)


@st.composite
def placements(draw: Draw, axes: Axes, ndim: int, *, partial: bool = True) -> tuple[Placement, ...]:
    """A placement for each axis in torch's form; dims count from the front or the back."""
    ops = draw(pending(len(axes)))
    out: list[Placement] = []
    for op in ops:
        kinds: list[Placement] = [Replicate()]
        if ndim:
            # twice, since most properties are about sharded axes
            kinds += [Shard(draw(st.integers(-ndim, ndim - 1)))] * 2
        out.append(draw(st.sampled_from([*kinds, Partial(op)] if partial else kinds)))
    return tuple(out)


@st.composite
def writings(draw: Draw, axes: Axes, shape: Sequence[int]) -> Writing:
    """Dims of any factors, split by any of the axes in any order, in any equivalent form."""
    dims = [[(size, []) for size in draw(factorings(n))] for n in shape]
    factors = [factor for dim in dims for factor in dim]
    for axis in draw(st.permutations(range(len(axes)))):
        if factors and draw(st.integers(0, 3)):
            draw(st.sampled_from(factors))[1].append(axis)
    return [[Factor(size, tuple(splitting)) for size, splitting in dim] for dim in dims]


@st.composite
def layouts(
    draw: Draw,
    axes: Axes | None = None,
    shape: Sequence[int] | None = None,
    *,
    partial: bool = True,
    plain: bool = False,
) -> Layout:
    """Layouts over the given or any axes and shape; `plain` ones are those that torch's placements can express."""
    axes = draw(_any_axes()) if axes is None else axes
    shape = draw(shapes()) if shape is None else tuple(shape)
    if plain:
        return Layout.of(shape, axes, draw(placements(axes, len(shape), partial=partial)))
    dims = draw(writings(axes, shape))
    free = sorted(set(range(len(axes))) - {a for dim in dims for f in dim for a in f.axes})
    pending_axes = [a for a in free if partial and draw(st.booleans())]
    return Layout(axes, dims, dict(zip(pending_axes, draw(pending(len(pending_axes))), strict=True)))


@st.composite
def regroupings(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """Another shape of the same number of elements: dims merged or split, ones inserted, or an unrelated shape."""
    if 0 in shape:
        return tuple(draw(st.permutations([0, *draw(shapes(max_dims=3))])))
    if draw(st.integers(0, 3)) == 0:
        return draw(factorings(math.prod(shape)))
    out: list[int] = []
    for size in shape:
        if out and draw(st.booleans()):
            out[-1] *= size
        else:
            out.append(size)
    out = [part for size in out for part in (draw(factorings(size)) if draw(st.booleans()) else [size])]
    return tuple(n for n in out if n > 1 or draw(st.booleans()))


def coords(axes: Axes) -> Iterator[tuple[int, ...]]:
    """Every coord of a mesh, in row-major order."""
    return itertools.product(*(range(n) for n in axes.sizes))


def counting(shape: Sequence[int]) -> np.ndarray:
    """A dense array whose elements are their row-major indices."""
    return np.arange(math.prod(shape)).reshape(tuple(shape))


def block_of(dense: np.ndarray, owned: Sequence[Sequence[int]]) -> np.ndarray:
    """The part of a dense array at the given indices of each dim."""
    for d, indices in enumerate(owned):
        dense = dense.take(np.asarray(indices, dtype=np.int64), axis=d)
    return dense


def owned_by_definition(
    writing: Sequence[Sequence[Factor]], axes: Axes, coord: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The indices of each dim that a coord owns: factor by factor, axis by axis, by slicing NumPy arrays.

    This is the definition of a layout, and does not use canonical forms.
    """
    out = []
    for dim in writing:
        indices = counting([f.size for f in dim])
        for d, f in enumerate(dim):
            for axis in f.axes:
                chunk = -(-indices.shape[d] // axes.sizes[axis])
                mine = slice(coord[axis] * chunk, (coord[axis] + 1) * chunk)
                indices = indices[(*[slice(None)] * d, mine)]
        out.append(tuple(indices.ravel().tolist()))
    return tuple(out)


def every_factoring(n: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `n` as a product of sizes above 1, in any order."""
    yield (n,)
    for d in divisors(n)[1:-1]:
        for rest in every_factoring(n // d):
            yield (d, *rest)


def every_writing(axes: Axes, shape: Sequence[int]) -> Iterator[Writing]:
    """All layouts of a shape in all ways to write them, with up to one factor of size 1 in each dim."""

    def with_one(n: int) -> Iterator[tuple[int, ...]]:
        for sizes in every_factoring(n):
            yield sizes
            for i in range(len(sizes) + 1):
                yield (*sizes[:i], 1, *sizes[i:])

    for sizes in itertools.product(*(with_one(n) for n in shape)):
        flat = [size for dim in sizes for size in dim]
        for count in range(len(axes) + 1):
            for order in itertools.permutations(range(len(axes)), count):
                for positions in itertools.combinations_with_replacement(range(len(flat)), count):
                    splitting = [
                        tuple(a for a, p in zip(order, positions, strict=True) if p == i)
                        for i in range(len(flat))
                    ]
                    factors = iter(map(Factor, flat, splitting))
                    yield [[next(factors) for _ in dim] for dim in sizes]
