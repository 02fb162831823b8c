"""Which elements of a tensor a block holds, as runs of consecutive row-major indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.errors import LayoutError

__all__ = ["Cells"]

I64 = NDArray[np.int64]

MOST = 2**49
"""The most elements a tensor may have: a philox block has a 48-bit number and makes two 64-bit values."""


class Cells:
    """The cells of a block in a tensor of a given shape: per dim the global indices, all of them if none are given.

    A block is `rows` runs of `run` consecutive elements each; what lies next to each other in the tensor is one run.

    >>> Cells((4, 6), (range(2, 4), range(6)))
    Cells (2, 6) of (4, 6): 1 x 12
    >>> cells = Cells((4, 6), (range(4), [0, 1, 4, 5]))
    >>> cells, cells.starts(0, 4)
    (Cells (4, 4) of (4, 6): 8 x 2, array([ 0,  4,  6, 10]))
    >>> cells.linear(6, 10)
    array([10, 11, 12, 13])
    """

    __slots__ = ("_base", "_outer", "indices", "numel", "rows", "run", "shape", "whole")

    def __init__(self, shape: Sequence[int], indices: Sequence[Sequence[int]] | None = None) -> None:
        self.whole = tuple(shape)
        self.indices = tuple(range(n) for n in self.whole) if indices is None else tuple(indices)
        if len(self.indices) != len(self.whole):
            raise LayoutError(
                f"{len(self.indices)} dims of indices do not fit a tensor of shape {self.whole}.",
                why=f"the tensor has {len(self.whole)} dims",
                fix="give the indices of each dim",
            )
        if (count := math.prod(self.whole)) > MOST:
            raise LayoutError(
                f"no random numbers for a tensor of shape {self.whole}.",
                why=f"it has {count} elements; the stream numbers at most 2**49 of them in one call",
                fix="draw it in several calls",
            )
        self.shape = tuple(len(i) for i in self.indices)
        self.numel = math.prod(self.shape)
        self._outer: list[I64] = []
        self._base, self.run = 0, 1
        if self.numel:
            self._merge()
        self.rows = self.numel // self.run

    def _merge(self) -> None:
        stride, within = 1, True  # within: all there is inside a dim is one run, so its neighbours join
        for size, index in zip(reversed(self.whole), reversed(self.indices), strict=True):
            starts: Sequence[int] | I64 = index
            if within:
                starts, length = _runs(index)
                self.run = length * stride
                within = length == size
            if len(starts) == 1:
                self._base += int(starts[0]) * stride
            else:
                self._outer.insert(0, _array(starts) * stride)
            stride *= size

    def starts(self, lo: int, hi: int) -> I64:
        """The global index each run begins at, of the runs lo to hi."""
        if len(self._outer) == 1:
            return self._outer[0][lo:hi] + self._base
        out = np.full(hi - lo, self._base, np.int64)
        row = np.arange(lo, hi, dtype=np.int64)
        for starts in reversed(self._outer):
            row, at = np.divmod(row, len(starts))
            out += starts[at]
        return out

    def linear(self, lo: int, hi: int) -> I64:
        """The global indices of the elements lo to hi of the block."""
        if lo == hi:
            return np.empty(0, np.int64)
        first, last = lo // self.run, (hi - 1) // self.run
        starts = self.starts(first, last + 1)
        out = np.arange(lo, hi, dtype=np.int64)
        if first == last:
            out += starts[0] - first * self.run
        else:
            row = out // self.run
            out -= row * self.run
            row -= first
            out += starts[row]
        return out

    def pairs(self) -> Cells:
        """The cells of both parts of complex elements, in a real tensor with one more dim, of size 2."""
        return Cells((*self.whole, 2), (*self.indices, range(2)))

    def __repr__(self) -> str:
        return f"Cells {self.shape} of {self.whole}: {self.rows} x {self.run}"


def _array(index: Sequence[int] | I64) -> I64:
    if isinstance(index, range):  # which NumPy would read number by number
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    return np.asarray(index, np.int64)


def _runs(index: Sequence[int]) -> tuple[Sequence[int] | I64, int]:
    """Where runs of consecutive indices begin, and how long they are; uneven ones are cut to a common length."""
    if isinstance(index, range) and (index.step == 1 or len(index) == 1):
        return index[:1], len(index)
    at = _array(index)
    ends = np.flatnonzero(np.diff(at) != 1) + 1
    length = math.gcd(len(at), *(int(end) for end in np.unique(np.diff(ends, prepend=0))))
    return at[::length], length
