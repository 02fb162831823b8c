"""Checksums that ranks can add: the sum of the checksums of the parts of a chunk is the checksum of the chunk.

The words of a chunk, 32 bits each, are multiplied by odd weights and added modulo 2**32. The weight of an element is the product
of a weight per dim, so that the checksum of any box is a few contractions. A rank that reads a part of a chunk computes its share
without reading the rest, and a changed bit always changes the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["MODULUS", "box_sum"]

MODULUS = 2**32
_TABLE = 1 << 16
U32 = NDArray[np.uint32]


@lru_cache(maxsize=64)
def _table(dim: int) -> U32:
    """The weights of the first indices of a dim, which are odd."""
    x = np.arange(1, _TABLE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        dim * 0x632BE5AB | 1
    )
    x ^= x >> np.uint64(31)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(29)
    return x.astype(np.uint32) | np.uint32(1)


def _words(array: NDArray[np.generic]) -> U32:
    """Elements as words of 32 bits; wider ones get a last dim of words."""
    size = array.dtype.itemsize
    if size == 4:
        return array.view(np.uint32)
    if size < 4:
        return array.view(np.uint8 if size == 1 else np.uint16).astype(np.uint32)
    return np.asarray(array, order="C")[..., None].view(np.uint32)


def box_sum(array: NDArray[np.generic], start: Sequence[int]) -> int:
    """The share of a box in the checksum of a chunk, given the index in the chunk where the box begins.

    >>> x = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> (box_sum(x[:, :1], (0, 0)) + box_sum(x[:, 1:], (0, 1))) % MODULUS == box_sum(x, (0, 0))
    True
    >>> x[2, 1] += 1e-6
    >>> box_sum(x, (0, 0)) == box_sum(np.arange(12, dtype=np.float32).reshape(3, 4), (0, 0))
    False
    """
    if array.size == 0:
        return 0
    words = _words(array)
    at = [*start, *[0] * (words.ndim - len(start))]
    dims = list(range(words.ndim))
    while dims:
        longest = max(range(len(dims)), key=lambda i: words.shape[i])
        words = _contract(words, longest, dims.pop(longest), at.pop(longest))
    return int(words)


def _contract(words: U32, axis: int, dim: int, start: int) -> U32:
    """Sum along an axis with the weights of a dim, whose index there begins at `start`."""
    total: U32 | None = None
    table, done, size = _table(dim), 0, words.shape[axis]
    letters = "abcdefghijklmnopqrstuvwxyz"[: words.ndim]
    form = f"{letters},{letters[axis]}->{letters.replace(letters[axis], '')}"
    while done < size:
        block, first = divmod(start + done, _TABLE)
        count = min(size - done, _TABLE - first)
        part = words[(slice(None),) * axis + (slice(done, done + count),)]
        found = np.einsum(form, part, table[first : first + count])
        if block:
            found = np.multiply(found, _table(dim + 64 + block // _TABLE)[block % _TABLE], dtype=np.uint32)
        total = found if total is None else np.add(total, found, dtype=np.uint32)
        done += count
    return np.asarray(total, np.uint32)
