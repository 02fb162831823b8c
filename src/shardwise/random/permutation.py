"""Permutations of which each block can be computed by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import BlockIndices
from shardwise.random.fill import Recipe, at, fill, parts
from shardwise.random.philox import Draw

__all__ = ["permutation"]

_MAX_SORT = 4096  # up to this size random words are sorted, so that all permutations are equally likely
_ROUNDS = 12
_WORDS = Recipe(True, lambda word: word)


def permutation(
    draw: Draw, indices: BlockIndices, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu"
) -> Tensor:
    """A block of a permutation of the integers below the number of elements of the full tensor.

    Large ones are Feistel networks: a number below a * b, a product just above the size, is a pair of digits below a
    and below b, and each round adds to one digit a random function of the other. Results beyond the size are
    permuted again until they are within it.

    >>> permutation(Draw(7, 0), BlockIndices((8,)))
    tensor([0, 2, 5, 3, 4, 1, 7, 6])
    >>> permutation(Draw(7, 0), BlockIndices((8,), (range(2, 4),)))
    tensor([5, 3])
    """
    n = math.prod(indices.full_shape)
    if not dtype.is_floating_point and n - 1 > torch.iinfo(dtype).max:
        raise LayoutError(
            f"A permutation of {n} integers was requested as {dtype}.",
            why=f"the largest integer of {dtype} is {torch.iinfo(dtype).max}",
            fix="pass dtype=torch.int64",
        )
    device = torch.device(device)
    if n <= _MAX_SORT:
        words = fill(draw, BlockIndices((n,)), _WORDS, torch.int64, device)
        index = torch.from_numpy(indices.linear(0, indices.numel)).to(device)
        return words.argsort(stable=True)[index].to(dtype).view(indices.shape)
    out = torch.empty(indices.numel, dtype=dtype, device=device)
    network = _Feistel(draw, n, indices.numel, device)
    for lo, hi in parts(indices.numel, device):
        out[lo:hi] = network(torch.from_numpy(indices.linear(lo, hi)).to(device))
    return out.view(indices.shape)


class _Feistel:
    """A random bijection of the integers below `n`, of which about `block` will be looked up."""

    def __init__(self, draw: Draw, n: int, block: int, device: torch.device) -> None:
        self._draw, self._n = draw, n
        self._outer = math.isqrt(n - 1) + 1
        self._inner = -(-n // self._outer)
        # with more integers to permute than digits, tabulate the random functions of the digits
        self._tables: list[Tensor] | None = None
        if self._outer <= block:
            digits = torch.arange(self._outer, device=device)
            self._tables = [self._compute(digits, r) for r in range(_ROUNDS)]

    def _compute(self, digit: Tensor, r: int) -> Tensor:
        size = self._inner if r % 2 else self._outer
        return (at(self._draw, digit, _WORDS, lane=r + 1) >> 1 & (2**63 - 1)) % size

    def _function(self, digit: Tensor, r: int) -> Tensor:
        return self._compute(digit, r) if self._tables is None else self._tables[r].index_select(0, digit)

    def _permute(self, index: Tensor) -> Tensor:
        outer, inner = index // self._inner, index % self._inner
        for r in range(_ROUNDS):
            if r % 2:
                inner = (inner + self._function(outer, r)) % self._inner
            else:
                outer = (outer + self._function(inner, r)) % self._outer
        return outer * self._inner + inner

    def __call__(self, index: Tensor) -> Tensor:
        out = self._permute(index)
        while (outside := (out >= self._n).nonzero().view(-1)).numel():
            out.index_copy_(0, outside, self._permute(out.index_select(0, outside)))
        return out
