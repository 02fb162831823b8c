"""The cells of a layout: the boxes into which it splits a tensor, and the ranks that hold each of them.

Everything here follows from layouts alone, so that every rank computes what all ranks write without asking them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Axes, Dim, Layout

__all__ = ["Grid", "assign_writers", "grid_of"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor cut along each dim: dim `d` begins new cells at `cuts[d][:-1]`, and ends at `cuts[d][-1]`.

    `owners` has for each cell, in row-major order, the positions on the mesh of the ranks that hold it.
    """

    cuts: tuple[I64, ...]
    owners: I64

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells along each dim."""
        return tuple(len(c) - 1 for c in self.cuts)

    def elements(self) -> I64:
        """The number of elements of each cell, in row-major order."""
        out = np.ones(1, np.int64)
        for cuts in self.cuts:
            out = np.multiply.outer(out, np.diff(cuts)).reshape(-1)
        return out

    def box(self, cell: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The offset and the shape of a cell."""
        offset, shape = [], []
        for cuts in reversed(self.cuts):
            cell, at = divmod(cell, len(cuts) - 1)
            begin, end = int(cuts[at]), int(cuts[at + 1])
            offset.append(begin)
            shape.append(end - begin)
        return tuple(reversed(offset)), tuple(reversed(shape))


@lru_cache(maxsize=4096)
def _dim_cells(dim: Dim, sizes: tuple[int, ...]) -> tuple[I64, I64]:
    """Where the cells of a dim begin, with its end, and the position on the mesh of the coord that owns each.

    >>> from shardwise.layout import Factor
    >>> [c.tolist() for c in _dim_cells((Factor(5, (0,)),), (4,))]
    [[0, 2, 4, 5], [0, 1, 2]]
    >>> [c.tolist() for c in _dim_cells((Factor(2), Factor(4, (1,))), (2, 2))]
    [[0, 2, 4, 6, 8], [0, 1, 0, 1]]
    """
    starts, ends, owners = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64)
    size = 1
    for factor in dim:
        low, high, at = _factor_cells(factor.size, factor.axes, sizes)
        size *= factor.size
        if len(low) == 1:  # not split: cells that are whole so far stay whole
            starts, ends = starts * factor.size, ends * factor.size
            continue
        # a range of indices of the outer factors holds one range of this factor for each of them
        outer = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        held = np.repeat(owners, ends - starts)
        starts = (outer[:, None] * factor.size + low).reshape(-1)
        ends = (outer[:, None] * factor.size + high).reshape(-1)
        owners = (held[:, None] + at).reshape(-1)
    order = np.argsort(starts, kind="stable")
    cuts = np.append(starts[order], size)
    return (cuts[-1:] if size == 0 else cuts), owners[order][: 0 if size == 0 else None]


def _factor_cells(size: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[I64, I64, I64]:
    """The ranges of a factor that are not empty, and the position on the mesh of the coord that owns each."""
    low, length = np.zeros(1, np.int64), np.full(1, size, np.int64)
    at = np.zeros(1, np.int64)
    for axis in axes:
        n = sizes[axis]
        chunk = -(-length // n)
        start = np.minimum(np.arange(n) * chunk[:, None], length[:, None])
        rest = np.minimum(chunk[:, None], length[:, None] - start)
        low, length = (low[:, None] + start).reshape(-1), rest.reshape(-1)
        at = (at[:, None] + np.arange(n) * math.prod(sizes[axis + 1 :])).reshape(-1)
    keep = length > 0
    return low[keep], (low + length)[keep], at[keep]


def grid_of(layout: Layout) -> Grid:
    """The cells of a layout without pending reductions.

    >>> from shardwise.layout import parse_layout
    >>> grid = grid_of(parse_layout("[5:tp, 4]", Axes((2, 2), ("dp", "tp")))[0])
    >>> [c.tolist() for c in grid.cuts], grid.owners.tolist(), grid.box(1)
    ([[0, 3, 5], [0, 4]], [[0, 2], [1, 3]], ((3, 0), (2, 4)))
    """
    sizes = layout.axes.sizes
    owners = np.zeros(1, np.int64)
    cuts = []
    for dim in layout.dims:
        along, at = _dim_cells(dim, sizes)
        cuts.append(along)
        owners = np.add.outer(owners, at).reshape(-1)
    used = frozenset(a for dim in layout.dims for f in dim for a in f.axes)
    copies = _copies(layout.axes, tuple(a for a in range(len(sizes)) if a not in used))
    return Grid(tuple(cuts), owners[:, None] + copies)


@lru_cache(maxsize=256)
def _copies(axes: Axes, replicated: tuple[int, ...]) -> I64:
    """The distance on the mesh from a coord to those that hold the same values."""
    out = np.zeros(1, np.int64)
    for a in replicated:
        out = np.add.outer(out, np.arange(axes.sizes[a]) * math.prod(axes.sizes[a + 1 :])).reshape(-1)
    return out


def assign_writers(grids: Sequence[tuple[Grid, I64, int]], world: int) -> list[I64]:
    """For each cell the rank that writes it: of those that hold it, the one that has the fewest bytes to write so far.

    Args:
        grids: per tensor its grid, the ranks of its mesh (a row for each sibling of a sub-mesh), and the bytes of an element.
        world: the number of ranks.
    """
    load = np.zeros(world, np.int64)
    out = []
    for grid, ranks, itemsize in grids:
        if not len(grid.owners):  # no elements
            out.append(np.empty(0, np.int64))
            continue
        holders = ranks[:, grid.owners].swapaxes(0, 1).reshape(len(grid.owners), -1)
        size = grid.elements() * itemsize
        if len(holders) == 1:
            writers = holders[:, load[holders[0]].argmin()]
        elif holders.shape[1] == 1:
            writers = holders[:, 0]
        else:
            least = load[holders].argmin(axis=1)
            writers = holders[np.arange(len(holders)), least]
        np.add.at(load, writers, size)
        out.append(writers)
    return out
