"""Halo exchange: ranks get the positions that their windows cover, or windows that touch their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.alternatives.exchange import SplitDim, clamp_range, pad_range, split_dim
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout
from shardwise.plan import Plan, plan_exchanges
from shardwise.plan.exchange import Range
from shardwise.plan.windows import Window

__all__ = ["Halo", "plan_to_positions", "plan_to_windows", "resize_dims", "split_halos"]


@dataclass(frozen=True)
class Halo:
    """A dim of `size` positions over which `count` windows slide, both split by the same mesh axes."""

    split: SplitDim
    window: Window
    size: int
    count: int

    @property
    def dim(self) -> int:
        return self.split.dim

    def positions(self, coord: Coord) -> Range:
        """The positions in a rank's block."""
        return self.split.ranges(self.size)[self.split.position(coord)]

    def windows(self, coord: Coord) -> Range:
        """The windows in a rank's block."""
        return self.split.ranges(self.count)[self.split.position(coord)]

    def covered(self, coord: Coord) -> tuple[Range, Range]:
        """The range that a rank's own windows cover, and the part of it inside the dim."""
        covered = self.window.covered(self.windows(coord))
        return covered, clamp_range(covered, 0, self.size)

    def touching(self, coord: Coord) -> Range:
        """The windows that touch a rank's own positions."""
        return self.window.touching(self.positions(coord), self.count)

    def touched(self, coord: Coord) -> tuple[Range, Range]:
        """A rank's own positions, and the range covered by the windows that touch them."""
        return self.positions(coord), self.window.covered(self.touching(coord))

    def pad(self, coord: Coord, block: Tensor, value: float = 0.0) -> Tensor:
        """The positions for a rank's windows, padded where the windows extend beyond the dim."""
        wants, has = self.covered(coord)
        return pad_range(block, self.dim, has, wants, value)

    def embed(self, coord: Coord, block: Tensor) -> Tensor:
        """A rank's own positions, inside the range covered by the windows that touch them."""
        own, covered = self.touched(coord)
        return pad_range(block, self.dim, own, covered)

    def crop(self, coord: Coord, block: Tensor) -> Tensor:
        """A rank's own positions, out of the range covered by the windows that touch them."""
        own, covered = self.touched(coord)
        return pad_range(block, self.dim, covered, own)


def plan_to_windows(halos: Sequence[Halo], layout: Layout, itemsize: int) -> Plan:
    """The plan that sends positions, which have this layout, to the ranks whose windows cover them."""
    moves = []
    for h in halos:
        covered = (h.window.covered(r) for r in h.split.ranges(h.count))
        moves.append(h.split.move(h.split.ranges(h.size), [clamp_range(r, 0, h.size) for r in covered]))
    return plan_exchanges(layout, moves, itemsize)


def plan_to_positions(halos: Sequence[Halo], layout: Layout, itemsize: int) -> Plan:
    """The plan that sends windows, which have this layout, to the ranks whose positions they touch."""
    moves = []
    for h in halos:
        wanted = [h.window.touching(r, h.count) for r in h.split.ranges(h.size)]
        moves.append(h.split.move(h.split.ranges(h.count), wanted))
    return plan_exchanges(layout, moves, itemsize)


def split_halos(
    layout: Layout, windows: Sequence[Window], sizes: Sequence[int], counts: Sequence[int]
) -> tuple[Halo, ...] | None:
    """The halos of the split dims among a tensor's last dims; None if none is split, or only a factor of one.

    Args:
        layout: the layout of the tensor, whether it has the positions or the windows.
        windows: the window of each of the last dims.
        sizes: the number of positions of each of them.
        counts: the number of windows of each of them.
    """
    first, halos = layout.ndim - len(windows), []
    for i, window in enumerate(windows):
        split = split_dim(layout, first + i)
        if split is None:
            return None
        if split.axes:
            halos.append(Halo(split, window, sizes[i], counts[i]))
    return tuple(halos) or None


def resize_dims(layout: Layout, sizes: Sequence[int]) -> Layout:
    """A layout whose last dims have other sizes, each split by the same axes as one factor."""
    first = layout.ndim - len(sizes)
    for i, size in enumerate(sizes):
        axes = tuple(a for f in layout.dims[first + i] for a in f.axes)
        layout = layout.with_dim(first + i, Factor(size, axes))
    return layout
