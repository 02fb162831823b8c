"""Sliding windows along a dim, as in convolutions: the positions they cover, and the windows that touch a position."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.layout.sizes import least, most
from shardwise.plan.exchange import Range

__all__ = ["Window"]


class Window(NamedTuple):
    """A window of `size` positions, `dilation` apart, that moves by `stride` and starts `padding` before the dim.

    >>> w = Window(size=3, stride=2, padding=1)
    >>> w.covered((0, 2)), w.touching((2, 4), count=5)
    ((-1, 4), (1, 3))
    """

    size: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """The number of positions from the first of a window to the last, including gaps."""
        return self.dilation * (self.size - 1) + 1

    def covered(self, windows: Range) -> Range:
        """The positions that a range of windows covers, which may extend beyond the dim; empty for an empty range."""
        first, last = windows
        start = first * self.stride - self.padding
        if last <= first:
            return start, start
        return start, start + (last - 1 - first) * self.stride + self.span

    def touching(self, positions: Range, count: int) -> Range:
        """The range of those of `count` windows whose span overlaps a range of positions."""
        low, high = positions
        if high <= low:
            return 0, 0
        first = -((self.span - 1 - low - self.padding) // self.stride)
        last = (high - 1 + self.padding) // self.stride + 1
        first = least(most(first, 0), count)
        return first, most(least(last, count), first)
