"""Views: the layout of a tensor under another shape, if no block has to move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from operator import mul

from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, Factor, atoms, cut, take, with_idle
from shardwise.layout.layout import Layout
from shardwise.layout.sizes import same_sizes
from shardwise.layout.text import block_sizes_text

__all__ = ["view"]

_MOST_BLOCKS = 64  # whose sizes an error lists


def view(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of the same blocks under another global shape; LayoutError if a block would have to be divided.

    >>> from shardwise.layout import Axes, parse_layout
    >>> axes = Axes((2,), ("tp",))
    >>> view(parse_layout("[4, 6:tp]", axes)[0], (24,))
    [4 6:tp]
    >>> view(parse_layout("[4 6:tp]", axes)[0], (2, 2, 6))
    [2, 2, 6:tp]
    >>> view(parse_layout("[10:tp]", axes)[0], (2, 5))
    [2:tp, 5]
    """
    shape = tuple(shape)
    if math.prod(shape) != math.prod(layout.shape):
        raise LayoutError(
            f"view{shape} of {layout} has another number of elements.",
            why=f"The tensor has {math.prod(layout.shape)} elements and the shape has {math.prod(shape)}.",
            fix=f"Use a shape of {math.prod(layout.shape)} elements.",
        )
    if same_sizes(shape, layout.shape):
        return layout
    if 0 in shape:
        # no rank holds any element, so every layout is valid; a replicated one restricts later views the least
        return layout.with_dims([(Factor(n),) for n in shape])
    dims: list[Dim] = []
    for old, new in _groups(layout.shape, shape):
        if len(old) == len(new) == 1:
            dims.append(layout.dims[old[0]])
        else:
            dims.extend(_regroup(layout, [layout.dims[d] for d in old], [shape[d] for d in new], shape))
    return layout.with_dims(dims)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of old and new dims with equal products, in order."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(a), j + len(b)
        x, y = math.prod(old[k] for k in a), math.prod(new[k] for k in b)
        while x != y:
            if x < y:
                a, x, i = [*a, i], x * old[i], i + 1
            else:
                b, y, j = [*b, j], y * new[j], j + 1
        # trailing dims of size 1 join the last run
        if math.prod(old[i:]) == math.prod(new[j:]) == 1 and (i == len(old)) != (j == len(new)):
            a, b = [*a, *range(i, len(old))], [*b, *range(j, len(new))]
            i, j = len(old), len(new)
        yield a, b


def _regroup(layout: Layout, old: Sequence[Dim], new: Sequence[int], shape: tuple[int, ...]) -> list[Dim]:
    small = [f for dim in old for f in dim]
    if layout.is_symbolic:
        # without asking whether the axes divide a size, if that makes no difference
        found = _take_all(*atoms(small, layout.axes.sizes), layout, new)
        if not isinstance(found, int):
            return found
    found = _take_all(*atoms(small, layout.axes.sizes, ask=True), layout, new)
    if isinstance(found, int):
        raise _divides_blocks(layout, found, shape)
    return found


def _take_all(
    factors: Sequence[Factor], idle: tuple[int, ...], layout: Layout, new: Sequence[int]
) -> list[Dim] | int:
    """Dims of these sizes, of some factors; or an axis whose blocks would be divided."""
    out: list[Dim] = []
    for size in new:
        taken = take(factors, size)
        if taken is None:
            ends = accumulate((f.size for f in factors), mul)
            return next(f for f, end in zip(factors, ends, strict=True) if f.axes and size % end).axes[0]
        dim, factors = taken
        out.append(dim)
    if idle and not out:
        return idle[0]
    return with_idle(out, idle, layout.axes.sizes) if idle else out


def _divides_blocks(layout: Layout, axis: int, shape: tuple[int, ...]) -> LayoutError:
    axes = layout.axes
    f = next(f for dim in layout.dims for f in dim if axis in f.axes)
    names, parts = ",".join(axes.names_of(f.axes)), axes.sizes_of(f.axes)
    sizes = ""
    if math.prod(parts) <= _MOST_BLOCKS:
        ranges = [cut(f.size, parts, coord) for coord in product(*map(range, parts))]
        sizes = " " + block_sizes_text(tuple(hi - lo for lo, hi in ranges))
    return LayoutError(
        f"view{shape} cannot keep {layout} on {names}.",
        why=f"The dims of {shape} do not line up with {names}'s blocks{sizes}.",
        fix=f"x.redistribute({', '.join(f'{axes.names[a]}=Replicate()' for a in f.axes)}) first, or view before sharding",
    )
