"""Two layouts of one shape, seen through common factors, so that blocks meet in boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from shardwise.layout.factor import Dim, Factor, atoms, cut, merged, take
from shardwise.layout.layout import Layout

__all__ = ["Box", "Piece", "Pieces", "meet", "refine"]


class Piece(NamedTuple):
    """A common factor of both layouts: its size and the axes that split it there and here."""

    size: int
    source: tuple[int, ...]
    target: tuple[int, ...]


Pieces = tuple[tuple[Piece, ...], ...]
"""The pieces of each dim."""


@lru_cache(maxsize=8192)
def refine(source: Layout, target: Layout) -> Pieces | None:
    """The common factors of two layouts, or None if some blocks of one cut across those of the other.

    >>> from shardwise.layout import Axes, parse_layout
    >>> axes = Axes((2,), ("tp",))
    >>> refine(parse_layout("[24:tp]", axes)[0], parse_layout("[4 6:tp]", axes)[0])
    ((Piece(size=4, source=(0,), target=()), Piece(size=6, source=(), target=(0,))),)
    """
    out = []
    for a, b in zip(source.dims, target.dims, strict=True):
        pieces = _refine_dim(a, b, source.axes.sizes)
        if pieces is None:
            return None
        out.append(pieces)
    return tuple(out)


def _refine_dim(source: Dim, target: Dim, sizes: Sequence[int]) -> tuple[Piece, ...] | None:
    if any(f.size == 0 for f in source):
        # nothing to move; one piece with no axes keeps the dim in its place
        return (Piece(0, (), ()),)
    if len(source) == len(target) == 1:
        return (Piece(source[0].size, source[0].axes, target[0].axes),)
    (a, idle_a), (b, idle_b) = atoms(source, sizes), atoms(target, sizes)
    pieces = _pieces(a, b, sizes)
    if pieces is not None and (idle_a or idle_b):
        return (Piece(1, idle_a, idle_b), *pieces)
    return pieces


def _pieces(a: Sequence[Factor], b: Sequence[Factor], sizes: Sequence[int]) -> tuple[Piece, ...] | None:
    """The fewest factors, each one factor on both sides, that two lists of atoms have in common."""
    if not a:
        return ()
    # A piece need not end but where an atom does, on one side or on both at once.
    ends = {math.lcm(x, y) for x in _ends(a) for y in _ends(b)} - {1}
    for size in sorted(ends, reverse=True):
        ours, theirs = take(a, size), take(b, size)
        if ours is None or theirs is None:
            continue
        x, y = merged(ours[0], sizes), merged(theirs[0], sizes)
        if len(x) == len(y) == 1:
            rest = _pieces(ours[1], theirs[1], sizes)
            if rest is not None:
                return (Piece(size, x[0].axes, y[0].axes), *rest)
    return None


def _ends(factors: Sequence[Factor]) -> list[int]:
    return list(accumulate((f.size for f in factors), mul, initial=1))


class Box(NamedTuple):
    """Where the common part of two blocks lies in one of them, per piece of each dim."""

    lengths: tuple[tuple[int, ...], ...]  # of the block, along each piece
    starts: tuple[tuple[int, ...], ...]  # of the common part, from the block's own beginning
    counts: tuple[tuple[int, ...], ...]  # of the common part


def meet(
    pieces: Pieces, sizes: Sequence[int], sender: Sequence[int], receiver: Sequence[int]
) -> tuple[Box, Box]:
    """What the source block at `sender` and the target block at `receiver` share, seen from either."""
    ours: list[tuple[tuple[int, ...], ...]] = []
    theirs: list[tuple[tuple[int, ...], ...]] = []
    for dim in pieces:
        rows, cols = [], []
        for size, source, target in dim:
            a, b = _range(size, source, sizes, sender), _range(size, target, sizes, receiver)
            low, high = max(a[0], b[0]), min(a[1], b[1])
            count = max(high - low, 0)
            rows.append((a[1] - a[0], low - a[0] if count else 0, count))
            cols.append((b[1] - b[0], low - b[0] if count else 0, count))
        ours.append(tuple(zip(*rows, strict=True)) if rows else ((), (), ()))
        theirs.append(tuple(zip(*cols, strict=True)) if cols else ((), (), ()))
    return _box(ours), _box(theirs)


def _box(dims: list[tuple[tuple[int, ...], ...]]) -> Box:
    return Box(tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims))


def _range(size: int, axes: tuple[int, ...], sizes: Sequence[int], coord: Sequence[int]) -> tuple[int, int]:
    if not axes:
        return 0, size
    return cut(size, [sizes[a] for a in axes], [coord[a] for a in axes])
