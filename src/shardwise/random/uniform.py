"""Uniform numbers: a word's upper bits, as many as the dtype holds exactly, so that 1 is never reached."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, fill
from shardwise.random.numpy_or_torch import Array, at_most, number, top
from shardwise.random.philox import Draw

__all__ = ["REAL_PART", "last_below", "uniform", "uniform_recipe"]

PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
REAL_PART = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def uniform(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    low: float = 0.0,
    high: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """A block of a tensor of uniform numbers from `low` up to, but never equal to, `high`.

    >>> whole = uniform(Draw(7, 0), Cells((2, 3)), torch.float32)
    >>> part = uniform(Draw(7, 0), Cells((2, 3), (range(2), range(1, 3))), torch.float32)
    >>> torch.equal(whole[:, 1:], part)
    True
    """
    if dtype in REAL_PART:
        parts = None if out is None else torch.view_as_real(out)
        parts = uniform(draw, cells.pairs(), REAL_PART[dtype], device, low, high, parts)
        return torch.view_as_complex(parts) if out is None else out
    return fill(draw, cells, uniform_recipe(dtype, low, high), dtype, device, out)


def uniform_recipe(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Recipe:
    """How words become uniform numbers."""
    count = precision(dtype, "uniform")
    most = last_below(high, dtype)

    def each(word: Array) -> Array:
        out = number(top(word, count))
        out *= 2.0**-count
        if (low, high) != (0.0, 1.0):
            out *= high - low
            out += low
            if low < high:
                at_most(out, most)
        return out

    return Recipe(wide=dtype == torch.float64, each=each)


def precision(dtype: torch.dtype, what: str) -> int:
    """How many bits a float dtype holds exactly, or an error that names the distribution."""
    if dtype in PRECISION:
        return PRECISION[dtype]
    raise LayoutError(
        f"{what} does not make {dtype}.",
        why="its numbers are real",
        fix=f"use one of {sorted(map(str, PRECISION))}",
    )


@lru_cache(maxsize=256)
def last_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of a dtype below a value.

    >>> last_below(1.0, torch.float32), last_below(1.0, torch.bfloat16), last_below(0.1, torch.float32)
    (0.9999999403953552, 0.99609375, 0.09999999403953552)
    """
    near = torch.tensor(value, dtype=dtype, device="cpu")
    if near.item() < value:
        return float(near.item())
    memory = near.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    if near.item() == 0:
        return -float(torch.tensor(1, dtype=memory.dtype, device="cpu").view(dtype).item())
    return float((memory - 1 if near.item() > 0 else memory + 1).view(dtype).item())
