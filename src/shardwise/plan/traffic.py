"""Exact element counts in closed form, without a loop over ranks."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout, Piece, refine

__all__ = ["elements_kept", "elements_shared"]

_Array = NDArray[np.int64]


def elements_kept(layout: Layout) -> int:
    """The total size of the blocks of all ranks; each axis that splits nothing multiplies it by the axis size.

    >>> from shardwise.layout import Axes, parse_layout
    >>> elements_kept(parse_layout("[5:dp, 3]", Axes((2, 4), ("dp", "tp")))[0])
    60
    """
    sharded = layout.sharded
    copies = math.prod(size for a, size in enumerate(layout.axes.sizes) if a not in sharded)
    return math.prod(layout.shape) * copies


def elements_shared(source: Layout, target: Layout) -> int:
    """The number of elements of its target block that each rank already holds, summed over all ranks."""
    pieces = refine(source, target)
    if pieces is None:
        return 0
    flat = [piece for dim in pieces for piece in dim]
    used = {a for piece in flat for a in piece.source + piece.target}
    copies = math.prod(size for a, size in enumerate(source.axes.sizes) if a not in used)
    return copies * math.prod(_shared(group, source.axes.sizes) for group in _connected(flat))


def _connected(pieces: list[Piece]) -> list[list[Piece]]:
    """The pieces in groups without a common axis, so that the counts of the groups multiply."""
    groups: list[tuple[set[int], list[Piece]]] = []
    for piece in pieces:
        axes, members = {*piece.source, *piece.target}, [piece]
        disjoint = []
        for other_axes, others in groups:
            if axes & other_axes:
                axes |= other_axes
                members = others + members
            else:
                disjoint.append((other_axes, others))
        groups = [*disjoint, (axes, members)]
    return [members for _, members in groups]


def _shared(pieces: list[Piece], sizes: tuple[int, ...]) -> int:
    axes = sorted({a for piece in pieces for a in piece.source + piece.target})
    if not axes:
        return math.prod(piece.size for piece in pieces)
    if len(pieces) == 1 and pieces[0].source == pieces[0].target:
        return pieces[0].size
    if any(type(piece.size) is not int for piece in pieces):
        return _shared_symbolic(pieces, sizes)
    overlaps = []
    for size, source, target in pieces:
        low_a, high_a = _ranges(size, source, axes, sizes)
        low_b, high_b = _ranges(size, target, axes, sizes)
        overlaps.append(np.maximum(np.minimum(high_a, high_b) - np.maximum(low_a, low_b), 0))
    counts = np.broadcast_to(reduce(np.multiply, overlaps), tuple(sizes[a] for a in axes))
    return int(counts.sum())


def _shared_symbolic(pieces: list[Piece], sizes: tuple[int, ...]) -> int:
    """`_shared` of pieces of symbolic sizes as if these were split evenly: then the count is proportional to the size."""
    times: int = 1
    fixed = []
    for piece in pieces:
        size = piece.size
        if type(size) is not int:
            parts = [math.prod(sizes[a] for a in side) for side in (piece.source, piece.target)]
            unit = math.lcm(*parts)
            times, size = times * (size // unit), unit
        fixed.append(Piece(size, piece.source, piece.target))
    return times * _shared(fixed, sizes)


def _ranges(
    size: int, split_by: tuple[int, ...], axes: list[int], sizes: tuple[int, ...]
) -> tuple[_Array, _Array]:
    """The lower and upper ends of the ranges of a factor that all coords own, as arrays over the given axes."""
    low, length = np.zeros((1,) * len(axes), np.int64), np.full((1,) * len(axes), size, np.int64)
    for a in split_by:
        coord = np.arange(sizes[a]).reshape([-1 if b == a else 1 for b in axes])
        chunk = -(-length // sizes[a])
        start = np.minimum(coord * chunk, length)
        length = np.minimum(chunk, length - start)
        low = low + start
    return low, low + length
