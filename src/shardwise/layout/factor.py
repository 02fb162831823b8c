"""Factors: a dim as a product of sizes, each split by mesh axes.

A factor is split as `torch.chunk` splits: into blocks of the rounded-up size, the last ones smaller or empty. Each
further axis splits the blocks of the axis before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.layout.sizes import as_size, divides, least

__all__ = [
    "Dim",
    "Factor",
    "atoms",
    "block_sizes",
    "canonical",
    "cut",
    "first_block",
    "leaves_some_empty",
    "merge",
    "split",
    "take",
    "with_idle",
]


class Factor(NamedTuple):
    """A size and the axes that split it, outermost first."""

    size: int
    axes: tuple[int, ...] = ()


Dim = tuple[Factor, ...]
"""The factors of a dim, outermost first; their sizes multiply to the dim's size. A dim of size 1 has none."""


def cut(size: int, parts: Sequence[int], coord: Sequence[int]) -> tuple[int, int]:
    """The range `[low, high)` that a coord owns of `size`, split by axes of sizes `parts`, outermost first.

    >>> [cut(5, (2, 2), (i, j)) for i in (0, 1) for j in (0, 1)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    low, length = 0, size
    for n, c in zip(parts, coord, strict=True):
        if type(length) is int:
            chunk = -(-length // n)
            start = min(c * chunk, length)
            length = min(chunk, length - start)
        else:
            start, stop = _start(length, n, c), _start(length, n, c + 1)
            length = stop - start
        low += start
    return low, low + length


def _start(size: int, n: int, c: int) -> int:
    """Where block `c` of `n` begins in a symbolic size. The lengths of all blocks add up to the size, as expressions, too."""
    if c == n:
        return size
    chunk = first_block(size, (n,))
    return c * chunk if c < 2 or divides(n, size) else least(c * chunk, size)


def first_block(size: int, parts: Iterable[int]) -> int:
    """The size of the first block, which is the largest."""
    for n in parts:
        size = -(-size // n) if type(size) is int else (size + n - 1) // n
    return size


def block_sizes(size: int, parts: Iterable[int]) -> set[int]:
    """The sizes that blocks have.

    >>> sorted(block_sizes(7, (2, 3)))
    [0, 1, 2]
    """
    sizes = {size}
    for n in parts:
        found = set()
        for m in sizes:
            chunk = -(-m // n)
            found |= {chunk, m % chunk or chunk, max(m - (n - 1) * chunk, 0)} if m else {0}
        sizes = found
    return sizes


def leaves_some_empty(size: int, parts: Sequence[int]) -> bool:
    """Whether some block of a size is empty; of a symbolic size this is a question.

    >>> leaves_some_empty(7, (2, 3)), leaves_some_empty(5, (2, 2))
    (True, False)
    """
    if type(size) is int:
        return 0 in block_sizes(size, parts)
    if not parts or divides(math.prod(parts), size):
        return False
    chunk = first_block(size, parts[:1])
    last = size - (parts[0] - 1) * chunk
    # if it is not empty, it is the only one that may be smaller than the others
    return last <= 0 or leaves_some_empty(chunk, parts[1:]) or leaves_some_empty(last, parts[1:])


def _same_blocks(outer: int, inner: int, parts: Sequence[int]) -> bool:
    """Whether the blocks of `outer * inner` are those of `outer`, each `inner` times as large."""
    if not parts or outer == 0 or inner == 1:
        return True
    chunk = -(-outer // parts[0])
    if -(-outer * inner // parts[0]) != chunk * inner:
        return False
    return _same_blocks(chunk, inner, parts[1:]) and _same_blocks(outer % chunk, inner, parts[1:])


def _merge_pair(a: Factor, b: Factor, sizes: Sequence[int]) -> tuple[Factor, ...]:
    """Merge adjacent atoms if that keeps the blocks; otherwise move as much of `b` into `a` as possible."""
    if not a.axes:
        return (a, b)
    parts = [sizes[x] for x in a.axes]
    if not _are_known(a.size, parts):
        return (a, b)
    if b.axes:
        single = first_block(a.size, parts) <= 1 and _same_blocks(a.size, b.size, parts)
        return (Factor(a.size * b.size, a.axes + b.axes),) if single else (a, b)
    if _same_blocks(a.size, b.size, parts):
        return (Factor(a.size * b.size, a.axes),)
    # An unevenly split factor can still absorb a small divisor of its neighbour: (5 over 3) x 4 is (10 over 3) x 2.
    # A divisor larger than the number of blocks never fits.
    for g in reversed(_divisors(b.size, math.prod(parts))):
        if 1 < g < b.size and _same_blocks(a.size, g, parts):
            return (Factor(a.size * g, a.axes), Factor(b.size // g))
    return (a, b)


def _are_known(size: int, parts: Sequence[int]) -> bool:
    """Whether the blocks of a size are known to be even or to be uneven; those of a symbol may be either."""
    return type(size) is int or divides(math.prod(parts), size)


def _divisors(size: int, most: int) -> list[int]:
    """The divisors of `size` that are at most `most`, and their cofactors, in ascending order."""
    low = [n for n in range(1, min(most, math.isqrt(size)) + 1) if size % n == 0]
    return low + [size // n for n in reversed(low) if n * n != size]


def _active_axes(f: Factor, sizes: Sequence[int]) -> int:
    """The number of axes that split a factor until its blocks have one element; the order of the rest is irrelevant."""
    size = f.size
    for i, axis in enumerate(f.axes):
        if size <= 1:
            return i
        size = -(-size // sizes[axis])
    return len(f.axes)


def atoms(
    factors: Iterable[Factor], sizes: Sequence[int], ask: bool = False
) -> tuple[list[Factor], tuple[int, ...]]:
    """The smallest factors with the same blocks, outermost first, and the idle axes, where only coord 0 owns anything.

    `ask`: take a symbolic size apart if the axes divide the size at hand, too, which is a question.

    >>> atoms([Factor(12, (0, 1)), Factor(1, (2,)), Factor(5)], (2, 2, 2))
    ([Factor(size=2, axes=(0,)), Factor(size=2, axes=(1,)), Factor(size=15, axes=())], (2,))
    """
    out: list[Factor] = []
    idle: list[int] = []
    for f in factors:
        active = _active_axes(f, sizes)
        idle += f.axes[active:]
        rest = Factor(f.size, f.axes[:active])
        while rest.axes:
            first, rest = _first_atom(rest, sizes, ask)
            out.append(first)
        if rest.size > 1 and out and not out[-1].axes:
            out[-1] = Factor(out[-1].size * rest.size)
        elif rest.size > 1:
            out.append(rest)
    return out, tuple(sorted(idle))


def _first_atom(f: Factor, sizes: Sequence[int], ask: bool) -> tuple[Factor, Factor]:
    outer = sizes[f.axes[0]]
    if type(f.size) is not int and not divides(outer, f.size) and not (ask and f.size % outer == 0):
        return f, Factor(1)
    if f.size % outer == 0:
        return Factor(outer, f.axes[:1]), Factor(f.size // outer, f.axes[1:])
    # If the atom's blocks have one element, its size is at most their number. Otherwise it is split unevenly, and
    # then its cofactor is less than that number.
    for outer in _divisors(f.size, math.prod(sizes[x] for x in f.axes))[1:]:
        parts = split(f, outer, sizes)
        if parts is not None:
            return parts
    return f, Factor(1)


def merge(small: Iterable[Factor], sizes: Sequence[int]) -> list[Factor]:
    """Merge atoms into as few factors as have the same blocks.

    >>> merge([Factor(2, (0,)), Factor(3, (1,)), Factor(4)], (2, 3))
    [Factor(size=24, axes=(0, 1))]
    """
    out: list[Factor] = []
    for f in small:
        out.extend(_merge_pair(out.pop(), f, sizes) if out else (f,))
    return out


def canonical(factors: Iterable[Factor], sizes: Sequence[int]) -> Dim:
    """The canonical factors of a dim: two dims with the same blocks are equal (except those of size 0).

    >>> canonical([Factor(4, (0,)), Factor(6)], (2,))
    (Factor(size=24, axes=(0,)),)
    >>> canonical([Factor(3, (0,)), Factor(4)], (2,))
    (Factor(size=3, axes=(0,)), Factor(size=4, axes=()))
    """
    factors = tuple([f if type(f[0]) is int else Factor(as_size(f[0]), f[1]) for f in factors])
    if len(factors) == 1 and not factors[0].axes:
        return () if factors[0].size == 1 else factors
    out = []
    for size, axes in factors:
        splitting = tuple([x for x in axes if sizes[x] > 1])
        if size != 1 or splitting:
            out.append(Factor(size, splitting))
    if any(f.size == 0 for f in out):
        return (Factor(0, tuple(sorted(x for f in out for x in f.axes))),)
    if len(out) > 1:
        # The atoms are unique, and so is the result of merging them.
        small, idle = atoms(out, sizes)
        dim = tuple(merge(small, sizes))
        return with_idle((dim,), idle, sizes)[0] if idle else dim
    for i, f in enumerate(out):
        active = _active_axes(f, sizes)
        out[i] = Factor(f.size, f.axes[:active] + tuple(sorted(f.axes[active:])))
    return tuple(out)


def with_idle(dims: Sequence[Dim], idle: tuple[int, ...], sizes: Sequence[int]) -> list[Dim]:
    """Attach idle axes to the first factor whose blocks have one element, or else to a new outermost factor of size 1.

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
    """Separate atoms into the outermost ones, of product `size`, and the rest; None if that would divide blocks.

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
    """Write a factor as `outer` times the rest; None if that would divide its blocks.

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
        complete = k == len(f.axes) or first_block(outer, parts) <= 1
        if complete and _same_blocks(outer, inner, parts):
            return Factor(outer, f.axes[:k]), Factor(inner, f.axes[k:])
    return None
