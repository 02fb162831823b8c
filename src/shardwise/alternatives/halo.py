"""Windows over split dims: a rank gets the positions its windows cover, or the windows that touch its positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.alternatives.exchange import fitted, plain_axes
from shardwise.comm import Coord
from shardwise.layout import Axes, Factor, Layout
from shardwise.plan import Move
from shardwise.plan.exchange import Range, chunked, place_of
from shardwise.plan.windows import Window

__all__ = ["Halo", "halos_of", "recut"]


@dataclass(frozen=True)
class Halo:
    """A dim of `size` positions over which `count` windows slide, both cut by the same axes of a mesh."""

    dim: int
    axes: tuple[int, ...]
    on: Axes
    window: Window
    size: int
    count: int

    @property
    def positions(self) -> tuple[Range, ...]:
        """What each rank has of the positions, by its place."""
        return chunked(self.size, self.axes, self.on)

    @property
    def windows(self) -> tuple[Range, ...]:
        """What each rank has of the windows, by its place."""
        return chunked(self.count, self.axes, self.on)

    def to_windows(self) -> Move:
        """Positions go where windows cover them."""
        wanted = tuple((_within(self.window.covered(w), self.size),) for w in self.windows)
        return Move(self.dim, self.axes, tuple((p,) for p in self.positions), wanted)

    def to_positions(self) -> Move:
        """Windows go where positions are that they touch."""
        wanted = tuple((self.window.touching(p, self.count),) for p in self.positions)
        return Move(self.dim, self.axes, tuple((w,) for w in self.windows), wanted)

    def covered(self, coord: Coord) -> tuple[Range, Range]:
        """What a rank's own windows cover, and what of that is in the dim."""
        here = self.window.covered(self.windows[self.place(coord)])
        return here, _within(here, self.size)

    def touched(self, coord: Coord) -> tuple[Range, Range]:
        """A rank's own positions, and what the windows cover that touch them."""
        mine = self.positions[self.place(coord)]
        return mine, self.window.covered(self.window.touching(mine, self.count))

    def near(self, coord: Coord) -> Range:
        """The windows that touch a rank's own positions."""
        return self.window.touching(self.positions[self.place(coord)], self.count)

    def place(self, coord: Coord) -> int:
        return place_of(coord, self.axes, self.on)

    def filled(self, coord: Coord, block: Tensor, value: float = 0.0) -> Tensor:
        """What came for a rank's windows, filled up where they reach beyond the dim."""
        wants, has = self.covered(coord)
        left, right = (has[0] - wants[0], wants[1] - has[1]) if has[1] > has[0] else (wants[1] - wants[0], 0)
        if not left and not right:
            return block
        amounts = [0] * (2 * (block.dim() - self.dim))
        amounts[-2:] = [left, right]
        return torch.constant_pad_nd(block, amounts, value)

    def spread(self, coord: Coord, block: Tensor) -> Tensor:
        """A rank's own positions, set into all that the windows that touch them cover."""
        mine, covered = self.touched(coord)
        return fitted(block, self.dim, mine, covered)

    def kept(self, coord: Coord, block: Tensor) -> Tensor:
        """Of what the windows cover that touch a rank's positions, those positions."""
        mine, covered = self.touched(coord)
        return fitted(block, self.dim, covered, mine)


def _within(r: Range, size: int) -> Range:
    low = min(max(r[0], 0), size)
    return low, max(min(r[1], size), low)


def halos_of(
    layout: Layout, windows: Sequence[Window], sizes: Sequence[int], counts: Sequence[int]
) -> list[Halo] | None:
    """Halos of those of a tensor's last dims that are split; None if one is not cut plainly, or none is split.

    `sizes` and `counts` are how many positions and windows each of these dims has, whichever the tensor's own are.
    """
    first = layout.ndim - len(windows)
    out = []
    for i, window in enumerate(windows):
        axes = plain_axes(layout, first + i)
        if axes is None:
            return None
        if axes:
            out.append(Halo(first + i, axes, layout.axes, window, sizes[i], counts[i]))
    return out or None


def recut(layout: Layout, sizes: Sequence[int]) -> Layout:
    """A layout whose last dims have other sizes, cut plainly by the same axes."""
    first = layout.ndim - len(sizes)
    for i, size in enumerate(sizes):
        axes = tuple(a for f in layout.dims[first + i] for a in f.axes)
        layout = layout.with_dim(first + i, Factor(size, axes))
    return layout
