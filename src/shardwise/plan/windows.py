"""Windows that slide along a dim: what a range of them covers, and which of them touch a range."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.exchange import Range

__all__ = ["Window"]


class Window(NamedTuple):
    """A window of `size` positions, `dilation` apart, that moves by `stride` and begins `padding` before the dim.

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
        """From its first position to its last."""
        return self.dilation * (self.size - 1) + 1

    def covered(self, windows: Range) -> Range:
        """The positions that some windows cover, which may lie outside of the dim; none for no windows."""
        first, last = windows
        at = first * self.stride - self.padding
        return (at, (last - 1) * self.stride - self.padding + self.span) if last > first else (at, at)

    def touching(self, positions: Range, count: int) -> Range:
        """Those of `count` windows that have one of some positions between their ends."""
        low, high = positions
        if high <= low:
            return 0, 0
        first = -((self.span - 1 - low - self.padding) // self.stride)
        last = (high - 1 + self.padding) // self.stride + 1
        first = min(max(first, 0), count)
        return first, max(min(last, count), first)
