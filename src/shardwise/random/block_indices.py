"""The elements of a tensor that a block holds, as runs of consecutive row-major indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.errors import LayoutError

__all__ = ["BlockIndices"]

I64 = NDArray[np.int64]

MAX_ELEMENTS = 2**49
"""The largest tensor: Philox blocks have 48-bit numbers, and each yields two 64-bit words."""


class BlockIndices:
    """The elements of one block of a tensor: the tensor's shape, and per dim the global indices in the block.

    Without `indices`, the block is the full tensor. The block consists of `rows` runs of `run` consecutive elements
    each; adjacent elements are merged into one run, across dims where possible.

    >>> BlockIndices((4, 6), (range(2, 4), range(6)))
    BlockIndices (2, 6) of (4, 6): 1 x 12
    >>> block = BlockIndices((4, 6), (range(4), [0, 1, 4, 5]))
    >>> block, block.starts(0, 4)
    (BlockIndices (4, 4) of (4, 6): 8 x 2, array([ 0,  4,  6, 10]))
    >>> block.linear(6, 10)
    array([10, 11, 12, 13])
    """

    __slots__ = ("_base", "_outer", "full_shape", "numel", "per_dim", "rows", "run", "shape")

    def __init__(self, shape: Sequence[int], indices: Sequence[Sequence[int]] | None = None) -> None:
        self.full_shape = tuple(shape)
        self.per_dim = tuple(range(n) for n in self.full_shape) if indices is None else tuple(indices)
        if (count := math.prod(self.full_shape)) > MAX_ELEMENTS:
            raise LayoutError(
                f"Random numbers were requested for a tensor of shape {self.full_shape} with {count} elements.",
                why="one call can number at most 2**49 elements",
                fix="fill slices of the tensor in several calls: for part in x.split(rows): part.normal_()",
            )
        self.shape = tuple(len(i) for i in self.per_dim)
        self.numel = math.prod(self.shape)
        self._outer: list[I64] = []
        self._base, self.run = 0, 1
        if self.numel:
            self._merge()
        self.rows = self.numel // self.run

    def _merge(self) -> None:
        stride, contiguous = 1, True  # contiguous: the dims inside this one form a single run
        for size, index in zip(reversed(self.full_shape), reversed(self.per_dim), strict=True):
            starts: Sequence[int] | I64 = index
            if contiguous:
                starts, length = _runs(index)
                self.run = length * stride
                contiguous = length == size
            if len(starts) == 1:
                self._base += int(starts[0]) * stride
            else:
                self._outer.insert(0, _array(starts) * stride)
            stride *= size

    def starts(self, lo: int, hi: int) -> I64:
        """The global index of the first element of each of the runs lo to hi."""
        if len(self._outer) == 1:
            return self._outer[0][lo:hi] + self._base
        out = np.full(hi - lo, self._base, np.int64)
        row = np.arange(lo, hi, dtype=np.int64)
        for starts in reversed(self._outer):
            row, at = np.divmod(row, len(starts))
            out += starts[at]
        return out

    def linear(self, lo: int, hi: int) -> I64:
        """The global indices of the block's elements lo to hi."""
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

    def pairs(self) -> BlockIndices:
        """The same block of a complex tensor viewed as real, with a last dim of size 2."""
        return BlockIndices((*self.full_shape, 2), (*self.per_dim, range(2)))

    def __repr__(self) -> str:
        return f"BlockIndices {self.shape} of {self.full_shape}: {self.rows} x {self.run}"


def _array(index: Sequence[int] | I64) -> I64:
    if isinstance(index, range):  # np.asarray would iterate over it
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    return np.asarray(index, np.int64)


def _runs(index: Sequence[int]) -> tuple[Sequence[int] | I64, int]:
    """The first index of each run of consecutive indices, and the runs' length; uneven runs are split evenly."""
    if isinstance(index, range) and (index.step == 1 or len(index) == 1):
        return index[:1], len(index)
    at = _array(index)
    ends = np.flatnonzero(np.diff(at) != 1) + 1
    length = math.gcd(len(at), *(int(end) for end in np.unique(np.diff(ends, prepend=0))))
    return at[::length], length
