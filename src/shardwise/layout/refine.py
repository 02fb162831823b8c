"""Refinement: common factors of two layouts of one shape, in which the intersection of two blocks is a box."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from shardwise.layout.factor import Dim, Factor, atoms, merge, take
from shardwise.layout.layout import Layout
from shardwise.layout.sizes import cached, common_multiple

__all__ = ["Piece", "Pieces", "refine"]


class Piece(NamedTuple):
    """A common factor of two layouts: its size and the axes that split it in the source and in the target."""

    size: int
    source: tuple[int, ...]
    target: tuple[int, ...]


Pieces = tuple[tuple[Piece, ...], ...]
"""The pieces of each dim."""


@cached(8192)
def refine(source: Layout, target: Layout) -> Pieces | None:
    """The common factors of two layouts, or None if the intersection of some blocks is not a box.

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
        return (Piece(0, (), ()),)  # there is nothing to move, but every dim has a piece
    if len(source) == len(target) == 1:
        return (Piece(source[0].size, source[0].axes, target[0].axes),)
    (a, idle_a), (b, idle_b) = atoms(source, sizes), atoms(target, sizes)
    pieces = _pieces(a, b, sizes)
    if pieces is not None and (idle_a or idle_b):
        return (Piece(1, idle_a, idle_b), *pieces)
    return pieces


def _pieces(a: Sequence[Factor], b: Sequence[Factor], sizes: Sequence[int]) -> tuple[Piece, ...] | None:
    """The fewest pieces that two lists of atoms have in common, each a single factor on both sides."""
    if not a:
        return ()
    # A piece ends where an atom ends, on one side or on both.
    ends = {common_multiple(x, y) for x in _ends(a) for y in _ends(b)} - {1}
    for size in sorted(ends, reverse=True):
        ours, theirs = take(a, size), take(b, size)
        if ours is None or theirs is None:
            continue
        x, y = merge(ours[0], sizes), merge(theirs[0], sizes)
        if len(x) == len(y) == 1:
            rest = _pieces(ours[1], theirs[1], sizes)
            if rest is not None:
                return (Piece(size, x[0].axes, y[0].axes), *rest)
    return None


def _ends(factors: Sequence[Factor]) -> list[int]:
    return list(accumulate((f.size for f in factors), mul, initial=1))
