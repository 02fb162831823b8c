"""Factors: how a dim, seen as a product of sizes, is cut by axes.

A factor is cut into blocks as `torch.chunk` cuts: ceil-sized, the last ones smaller or empty; each further
axis cuts the blocks of the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "Dim",
    "Factor",
    "atoms",
    "canonical",
    "cut",
    "first_block",
    "merged",
    "split",
    "take",
    "with_idle",
]


class Factor(NamedTuple):
    """A size and the axes that split it, outermost first."""

    size: int
    axes: tuple[int, ...] = ()


Dim = tuple[Factor, ...]
"""A dim: its factors, outermost first; their sizes multiply to the dim's size. A dim of size 1 has none."""


def cut(size: int, parts: Sequence[int], coord: Sequence[int]) -> tuple[int, int]:
    """The range `[low, high)` that a coord owns of `size` cut by `parts`, one after the other.

    >>> [cut(5, (2, 2), (i, j)) for i in (0, 1) for j in (0, 1)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    low, length = 0, size
    for n, c in zip(parts, coord, strict=True):
        chunk = -(-length // n)
        start = min(c * chunk, length)
        length = min(chunk, length - start)
        low += start
    return low, low + length


def first_block(size: int, parts: Iterable[int]) -> int:
    """The size of the first block, which is the largest."""
    for n in parts:
        size = -(-size // n)
    return size


def _cuts_alike(outer: int, inner: int, parts: Sequence[int]) -> bool:
    """Whether cutting `outer * inner` gives `inner` times the blocks of cutting `outer`."""
    if not parts or outer == 0 or inner == 1:
        return True
    chunk = -(-outer // parts[0])
    if -(-outer * inner // parts[0]) != chunk * inner:
        return False
    return _cuts_alike(chunk, inner, parts[1:]) and _cuts_alike(outer % chunk, inner, parts[1:])


def _merge(a: Factor, b: Factor, sizes: Sequence[int]) -> tuple[Factor, ...]:
    """Two neighbouring atoms as one factor if that cuts alike, else as they are (or with the outer one grown)."""
    if not a.axes:
        return (a, b)
    parts = [sizes[x] for x in a.axes]
    if b.axes:
        alone = first_block(a.size, parts) <= 1 and _cuts_alike(a.size, b.size, parts)
        return (Factor(a.size * b.size, a.axes + b.axes),) if alone else (a, b)
    if _cuts_alike(a.size, b.size, parts):
        return (Factor(a.size * b.size, a.axes),)
    # An uneven cut can still take in a small divisor of its neighbour: (5 over 3) x 4 is (10 over 3) x 2.
    # A larger one than the number of blocks never fits.
    for g in reversed(_divisors(b.size, math.prod(parts))):
        if 1 < g < b.size and _cuts_alike(a.size, g, parts):
            return (Factor(a.size * g, a.axes), Factor(b.size // g))
    return (a, b)


def _divisors(size: int, most: int) -> list[int]:
    """The divisors of a size that are at most `most`, or go into it at most so often, in order."""
    low = [n for n in range(1, min(most, math.isqrt(size)) + 1) if size % n == 0]
    return low + [size // n for n in reversed(low) if n * n != size]


def _busy(f: Factor, sizes: Sequence[int]) -> int:
    """How many of its axes cut a factor; of the rest, as its blocks have one element, the order says nothing."""
    size = f.size
    for i, axis in enumerate(f.axes):
        if size <= 1:
            return i
        size = -(-size // sizes[axis])
    return len(f.axes)


def atoms(factors: Iterable[Factor], sizes: Sequence[int]) -> tuple[list[Factor], tuple[int, ...]]:
    """The smallest factors that cut alike, outermost first, and the idle axes: all coords but 0 own nothing.

    >>> atoms([Factor(12, (0, 1)), Factor(1, (2,)), Factor(5)], (2, 2, 2))
    ([Factor(size=2, axes=(0,)), Factor(size=2, axes=(1,)), Factor(size=15, axes=())], (2,))
    """
    out: list[Factor] = []
    idle: list[int] = []
    for f in factors:
        busy = _busy(f, sizes)
        idle += f.axes[busy:]
        rest = Factor(f.size, f.axes[:busy])
        while rest.axes:
            first, rest = _first_atom(rest, sizes)
            out.append(first)
        if rest.size > 1 and out and not out[-1].axes:
            out[-1] = Factor(out[-1].size * rest.size)
        elif rest.size > 1:
            out.append(rest)
    return out, tuple(sorted(idle))


def _first_atom(f: Factor, sizes: Sequence[int]) -> tuple[Factor, Factor]:
    outer = sizes[f.axes[0]]
    if f.size % outer == 0:
        return Factor(outer, f.axes[:1]), Factor(f.size // outer, f.axes[1:])
    # Either its blocks have one element, so it is at most as large as their number; or its cut is uneven,
    # and then it goes into the factor less often than that.
    for outer in _divisors(f.size, math.prod(sizes[x] for x in f.axes))[1:]:
        parts = split(f, outer, sizes)
        if parts is not None:
            return parts
    return f, Factor(1)


def merged(small: Iterable[Factor], sizes: Sequence[int]) -> list[Factor]:
    """Atoms in as few factors as cut alike.

    >>> merged([Factor(2, (0,)), Factor(3, (1,)), Factor(4)], (2, 3))
    [Factor(size=24, axes=(0, 1))]
    """
    out: list[Factor] = []
    for f in small:
        out.extend(_merge(out.pop(), f, sizes) if out else (f,))
    return out


def canonical(factors: Iterable[Factor], sizes: Sequence[int]) -> Dim:
    """The one way to write a dim: equal cuts have equal values (but for dims of size 0, where nothing is cut).

    >>> canonical([Factor(4, (0,)), Factor(6)], (2,))
    (Factor(size=24, axes=(0,)),)
    >>> canonical([Factor(3, (0,)), Factor(4)], (2,))
    (Factor(size=3, axes=(0,)), Factor(size=4, axes=()))
    """
    kept = []
    for size, axes in factors:
        cutting = tuple([x for x in axes if sizes[x] > 1])
        if size != 1 or cutting:
            kept.append(Factor(size, cutting))
    if any(f.size == 0 for f in kept):
        return (Factor(0, tuple(sorted(x for f in kept for x in f.axes))),)
    if len(kept) > 1:
        # Down to atoms, which are unique, and up again in one way.
        small, idle = atoms(kept, sizes)
        dim = tuple(merged(small, sizes))
        return with_idle((dim,), idle, sizes)[0] if idle else dim
    for i, f in enumerate(kept):
        busy = _busy(f, sizes)
        kept[i] = Factor(f.size, f.axes[:busy] + tuple(sorted(f.axes[busy:])))
    return tuple(kept)


def with_idle(dims: Sequence[Dim], idle: tuple[int, ...], sizes: Sequence[int]) -> list[Dim]:
    """The dims with idle axes where they show least: on a factor with blocks of one element, or else in front.

    >>> with_idle([(Factor(6),), (Factor(2, (0,)),)], (1,), (2, 2))
    [(Factor(size=6, axes=()),), (Factor(size=2, axes=(0, 1)),)]
    >>> with_idle([(Factor(6),)], (1,), (2, 2))
    [(Factor(size=1, axes=(1,)), Factor(size=6, axes=()))]
    """
    out = list(dims)
    for d, dim in enumerate(out):
        for i, f in enumerate(dim or (Factor(1),)):
            if first_block(f.size, [sizes[x] for x in f.axes]) <= 1:
                out[d] = (*dim[:i], Factor(f.size, f.axes + idle), *dim[i + 1 :])
                return out
    out[0] = (Factor(1, idle), *out[0])
    return out


def take(factors: Sequence[Factor], size: int) -> tuple[Dim, list[Factor]] | None:
    """The outermost of some atoms, up to `size`, and those left; None if that would cut across blocks.

    >>> take([Factor(2, (0,)), Factor(6)], 4)
    ((Factor(size=2, axes=(0,)), Factor(size=2, axes=())), [Factor(size=3, axes=())])
    """
    out, rest = [], list(factors)
    while size > 1:
        f = rest[0]
        if size % f.size == 0:
            out.append(rest.pop(0))
            size //= f.size
        elif not f.axes and f.size % size == 0:
            out.append(Factor(size))
            rest[0] = Factor(f.size // size)
            size = 1
        else:
            return None
    return tuple(out), rest


def split(f: Factor, outer: int, sizes: Sequence[int]) -> tuple[Factor, Factor] | None:
    """A factor as `outer` times the rest, or None if that would cut across its blocks.

    >>> split(Factor(24, (0,)), 4, (2,))
    (Factor(size=4, axes=(0,)), Factor(size=6, axes=()))
    >>> split(Factor(24, (0,)), 3, (2,)) is None
    True
    """
    if outer == 0 or f.size % outer:
        return None
    inner = f.size // outer
    for k in range(len(f.axes), -1, -1):
        parts = [sizes[x] for x in f.axes[:k]]
        whole = k == len(f.axes) or first_block(outer, parts) <= 1
        if whole and _cuts_alike(outer, inner, parts):
            return Factor(outer, f.axes[:k]), Factor(inner, f.axes[k:])
    return None
