"""Philox 4x32-10: four 32-bit words from a 64-bit key and a 128-bit counter, in torch and in NumPy.

The torch version is the definition and runs on any device. The NumPy version computes the same words faster on the
CPU: it works on cache-sized chunks of consecutive blocks, in uint64 arithmetic, in preallocated memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CHUNK", "Draw", "Workspace", "counters", "philox"]

U64 = NDArray[np.uint64]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF

CHUNK = 16384
"""The number of Philox blocks computed at a time on the CPU, so that the workspace fits the second-level cache."""


class Draw(NamedTuple):
    """The seed and the stream position of one call that draws random numbers.

    >>> Draw(seed=7, position=0)
    Draw(seed=7, position=0)
    """

    seed: int
    position: int


def _keys(seed: int) -> list[tuple[int, int]]:
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    return [((k0 + r * _W0) & _LOW, (k1 + r * _W1) & _LOW) for r in range(_ROUNDS)]


def philox(counter: Sequence[Tensor | int], seed: int) -> tuple[Any, Any, Any, Any]:
    """The four random words for a counter of four words, which are ints or int64 tensors of one shape.

    >>> [hex(word) for word in philox((0, 0, 0, 0), 0)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in _keys(seed):
        p, q = c2 * _M1, c0 * _M0  # int64 wraps around: the bits are those of the unsigned product
        c0, c1 = (p >> 32 & _LOW) ^ c1 ^ k0, p & _LOW
        c2, c3 = (q >> 32 & _LOW) ^ c3 ^ k1, q & _LOW
    return c0, c1, c2, c3


def counters(draw: Draw, block: Tensor, lane: int = 0) -> tuple[Tensor, Tensor | int, int, int]:
    """The counters of Philox blocks, given their 48-bit numbers and a 16-bit lane."""
    position = draw.position
    return block & _LOW, block >> 32 | lane << 16, position & _LOW, position >> 32 & _LOW


def _scalar(value: int) -> U64:
    return np.array(value, np.uint64)  # 0-dim: half the overhead of a NumPy scalar in a ufunc


_m0, _m1, _low, _half = _scalar(_M0), _scalar(_M1), _scalar(_LOW), _scalar(32)


@lru_cache(maxsize=64)
def _key_scalars(seed: int) -> list[tuple[U64, U64]]:
    return [(_scalar(k0), _scalar(k1)) for k0, k1 in _keys(seed)]


class Workspace:
    """Memory for computing up to CHUNK blocks at a time; each thread needs its own."""

    def __init__(self) -> None:
        self._memory = np.empty((4, 2 * CHUNK), np.uint64)
        self._order = np.arange(CHUNK, dtype=np.uint64)

    def block_range(self, first: int, n: int) -> U64:
        """The numbers of `n` consecutive blocks, in memory that the next call overwrites."""
        return np.add(self._order[:n], _scalar(first), self._memory[3, :n])

    def words(self, draw: Draw, blocks: U64, lane: int = 0) -> tuple[U64, U64]:
        """Words 0 and 2, and words 1 and 3, of `n` blocks given by number, each as an array of shape (2, n).

        The upper halves of words 1 and 3 are undefined. The next call overwrites both arrays.
        """
        n = len(blocks)
        even, odd, product = (m[: 2 * n].reshape(2, n) for m in self._memory[:3])
        keys = _key_scalars(draw.seed)
        c2, c3 = draw.position & _LOW, draw.position >> 32 & _LOW
        first, last = int(blocks.min()) >> 32, int(blocks.max()) >> 32
        if first == last:
            c1 = first | lane << 16
            self._first_rounds(_keys(draw.seed), blocks, (c1, c2, c3), (even, odd, product))
            keys = keys[3:]
        else:
            np.bitwise_and(blocks, _low, even[0])
            np.right_shift(blocks, _half, odd[0])
            odd[0] |= _scalar(lane << 16)
            even[1], odd[1] = c2, c3
        a, c, p, q = even[0], even[1], product[0], product[1]
        for k0, k1 in keys:
            np.multiply(c, _m1, p)
            np.multiply(a, _m0, q)
            np.right_shift(product, _half, even)
            np.bitwise_xor(even, odd, even)
            np.bitwise_xor(a, k0, a)
            np.bitwise_xor(c, k1, c)
            np.bitwise_and(product, _low, odd)
        return even, product

    def _first_rounds(
        self,
        keys: list[tuple[int, int]],
        blocks: U64,
        high: tuple[int, int, int],
        memory: tuple[U64, U64, U64],
    ) -> None:
        """The first three rounds for counters that differ in c0 only, where half of the state is a scalar."""
        (a, c), (b, d), (p, q) = memory
        c1, c2, c3 = high
        product = c2 * _M1
        a1, b1 = product >> 32 ^ c1 ^ keys[0][0], product & _LOW
        np.bitwise_and(blocks, _low, a)
        np.multiply(a, _m0, q)
        np.right_shift(q, _half, c)
        np.bitwise_xor(c, _scalar(c3 ^ keys[0][1]), c)
        np.bitwise_and(q, _low, d)

        product = a1 * _M0
        np.multiply(c, _m1, p)
        np.bitwise_xor(d, _scalar(product >> 32 ^ keys[1][1]), c)
        np.right_shift(p, _half, a)
        np.bitwise_xor(a, _scalar(b1 ^ keys[1][0]), a)
        np.bitwise_and(p, _low, b)

        np.multiply(a, _m0, q)
        np.multiply(c, _m1, p)
        np.right_shift(memory[2], _half, memory[0])
        np.bitwise_xor(a, b, a)
        np.bitwise_xor(a, _scalar(keys[2][0]), a)
        np.bitwise_xor(c, _scalar((product & _LOW) ^ keys[2][1]), c)
        np.bitwise_and(memory[2], _low, memory[1])
