"""Uniform numbers: the upper bits of a word, as many as the dtype represents exactly, so that 1 is never reached."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwise.layout.errors import LayoutError
from shardwise.random.fill import Recipe, distribution
from shardwise.random.numpy_or_torch import Array, at_most, to_float, upper_bits

__all__ = ["PRECISION", "last_below", "precision", "uniform"]

PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


@distribution
def uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Recipe:
    """A block of uniform numbers from `low` up to, but excluding, `high`.

    >>> from shardwise.random import BlockIndices, Draw
    >>> full = uniform(Draw(7, 0), BlockIndices((2, 3)), torch.float32)
    >>> block = uniform(Draw(7, 0), BlockIndices((2, 3), (range(2), range(1, 3))), torch.float32)
    >>> torch.equal(full[:, 1:], block)
    True
    """
    real = dtype.to_real()
    count = precision(real, "uniform")
    most = last_below(high, real)

    def values(word: Array) -> Array:
        out = to_float(upper_bits(word, count))
        out *= 2.0**-count
        if (low, high) != (0.0, 1.0):
            out *= high - low
            out += low
            if low < high:
                at_most(out, most)
        return out

    return Recipe(real == torch.float64, values)


def precision(dtype: torch.dtype, distribution: str) -> int:
    """The number of bits that a float dtype represents exactly; an error that names the distribution for others."""
    if dtype in PRECISION:
        return PRECISION[dtype]
    raise LayoutError(
        f"{distribution} was called for a tensor of dtype {dtype}.",
        why=f"{distribution} numbers are real, and the dtype is not a supported floating-point dtype",
        fix=f"use one of {', '.join(map(str, PRECISION))}",
    )


@lru_cache(maxsize=256)
def last_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of a dtype that is less than a value.

    >>> last_below(1.0, torch.float32), last_below(1.0, torch.bfloat16), last_below(0.1, torch.float32)
    (0.9999999403953552, 0.99609375, 0.09999999403953552)
    """
    near = torch.tensor(value, dtype=dtype, device="cpu")
    if near.item() < value:
        return float(near.item())
    pattern = near.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    if near.item() == 0:
        return -float(torch.tensor(1, dtype=pattern.dtype, device="cpu").view(dtype).item())
    return float((pattern - 1 if near.item() > 0 else pattern + 1).view(dtype).item())
