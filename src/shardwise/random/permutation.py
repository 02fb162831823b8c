"""Permutations of which each block can be made by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, at, fill, parts
from shardwise.random.philox import Draw

__all__ = ["permutation"]

SORTED = 4096
"""Up to this size a permutation is made by sorting random words, so that each is as likely as any other."""

_ROUNDS = 12


def permutation(
    draw: Draw, cells: Cells, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu"
) -> Tensor:
    """A block of a permutation of as many numbers as the whole tensor has elements.

    Larger ones are a keyed bijection of the numbers below a product a * b, little more than their count: a number is
    a digit below a and one below b, and each round adds to one digit a random function of the other. What falls
    out of the range goes through again until it is within.

    >>> permutation(Draw(7, 0), Cells((8,)))
    tensor([0, 2, 5, 3, 4, 1, 7, 6])
    >>> permutation(Draw(7, 0), Cells((8,), (range(2, 4),)))
    tensor([5, 3])
    """
    n = math.prod(cells.whole)
    if dtype.is_floating_point is False and n - 1 > torch.iinfo(dtype).max:
        raise LayoutError(
            f"a permutation of {n} as {dtype}.",
            why=f"it holds up to {torch.iinfo(dtype).max}",
            fix="use int64",
        )
    device = torch.device(device)
    if n <= SORTED:
        words = fill(draw, Cells((n,)), Recipe(True, each=lambda word: word), torch.int64, device)
        index = torch.from_numpy(cells.linear(0, cells.numel)).to(device)
        return words.argsort(stable=True)[index].to(dtype).view(cells.shape)
    out = torch.empty(cells.numel, dtype=dtype, device=device)
    shuffle = _Shuffle(draw, n, cells.numel, device)
    for lo, hi in parts(cells.numel, device):
        out[lo:hi] = shuffle(torch.from_numpy(cells.linear(lo, hi)).to(device))
    return out.view(cells.shape)


class _Shuffle:
    """A bijection of the numbers below `n`, which is asked for about `wanted` of them."""

    def __init__(self, draw: Draw, n: int, wanted: int, device: torch.device) -> None:
        self._draw, self._n = draw, n
        self._outer = math.isqrt(n - 1) + 1
        self._inner = -(-n // self._outer)
        # Where there are more numbers to shuffle than digits, the functions of all digits are made once
        self._tables: list[Tensor] | None = None
        if self._outer <= wanted:
            digits = torch.arange(self._outer, device=device)
            self._tables = [self._made(digits, r) for r in range(_ROUNDS)]

    def _made(self, digit: Tensor, r: int) -> Tensor:
        size = self._inner if r % 2 else self._outer
        word = at(self._draw, digit, Recipe(True, each=lambda word: word), lane=r + 1)
        return (word >> 1 & (2**63 - 1)) % size

    def _of(self, digit: Tensor, r: int) -> Tensor:
        return self._made(digit, r) if self._tables is None else self._tables[r].index_select(0, digit)

    def _once(self, index: Tensor) -> Tensor:
        outer, inner = index // self._inner, index % self._inner
        for r in range(_ROUNDS):
            if r % 2:
                inner = (inner + self._of(outer, r)) % self._inner
            else:
                outer = (outer + self._of(inner, r)) % self._outer
        return outer * self._inner + inner

    def __call__(self, index: Tensor) -> Tensor:
        out = self._once(index)
        while (outside := (out >= self._n).nonzero().view(-1)).numel():
            out.index_copy_(0, outside, self._once(out.index_select(0, outside)))
        return out
