"""Views as layouts: another shape over the same blocks, without moving data, or the reason why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, Factor, atoms, cut, take, with_idle
from shardwise.layout.layout import Layout
from shardwise.layout.text import count_text

__all__ = ["view"]


def view(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of the same blocks seen as another global shape.

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
            why=f"{math.prod(layout.shape)} elements are not {math.prod(shape)}",
            fix="use a shape with the same product",
        )
    if shape == layout.shape:
        return layout
    if 0 in shape:
        # no rank holds anything, so every layout is this one; keep the one that promises least
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
        # dims of size 1 at the end belong to the last run, for there is none after it
        if math.prod(old[i:]) == math.prod(new[j:]) == 1 and (i == len(old)) != (j == len(new)):
            a, b = [*a, *range(i, len(old))], [*b, *range(j, len(new))]
            i, j = len(old), len(new)
        yield a, b


def _regroup(layout: Layout, old: Sequence[Dim], new: Sequence[int], shape: tuple[int, ...]) -> list[Dim]:
    sizes = layout.axes.sizes
    factors, idle = atoms((f for dim in old for f in dim), sizes)
    out: list[Dim] = []
    for size in new:
        taken = take(factors, size)
        if taken is None:
            ends = accumulate((f.size for f in factors), mul)
            first = next(f for f, end in zip(factors, ends, strict=True) if f.axes and size % end)
            raise _cuts(layout, first.axes, shape)
        dim, factors = taken
        out.append(dim)
    if idle and not out:
        raise _cuts(layout, idle, shape)
    return with_idle(out, idle, sizes) if idle else out


def _cuts(layout: Layout, near: tuple[int, ...], shape: tuple[int, ...]) -> LayoutError:
    axes = layout.axes
    f = next(f for dim in layout.dims for f in dim if near[0] in f.axes)
    names = ",".join(axes.names_of(f.axes))
    parts = axes.sizes_of(f.axes)
    blocks = [cut(f.size, parts, c) for c in _coords(parts)] if math.prod(parts) <= 64 else []
    sizes = count_text(tuple(hi - lo for lo, hi in blocks)) if blocks else ""
    return LayoutError(
        f"view{shape} cannot keep {layout} on {names}.",
        why=f"view{shape} cuts {names}'s blocks{' ' + sizes if sizes else ''} across rows",
        fix=f"x.redistribute({', '.join(f'{axes.names[a]}=Replicate()' for a in f.axes)}) first, or view before sharding",
    )


def _coords(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for c in range(sizes[0]):
        for rest in _coords(sizes[1:]):
            yield (c, *rest)
