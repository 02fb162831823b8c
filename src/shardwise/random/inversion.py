"""Exponential, geometric and Cauchy numbers, each from one word."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, fill
from shardwise.random.normal import half_open
from shardwise.random.numpy_or_torch import Array, at_least, at_most, bits, choose, number, signed
from shardwise.random.philox import Draw
from shardwise.random.portable_math import circle, ln
from shardwise.random.uniform import PRECISION, last_below, precision

__all__ = ["cauchy", "exponential", "geometric"]


def exponential(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lambd: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """A block of exponential numbers with rate `lambd`; none is 0.

    >>> bool((exponential(Draw(7, 0), Cells((100,)), torch.float32, lambd=2.0) > 0).all())
    True
    """
    precision(dtype, "exponential")
    if not lambd > 0:
        raise LayoutError(
            f"exponential with lambd={lambd}.", why="a rate is positive", fix="give such a rate"
        )
    least = torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24

    def each(word: Array) -> Array:
        power = 8 * word.itemsize - 1
        out = ln(half_open(word), scale=-1.0, power=power)
        at_least(out, 2.0 ** -(power + 2))  # 1 is among the numbers whose logarithm it is
        if lambd != 1.0:
            out *= 1 / lambd
        return at_least(out, least)

    return fill(draw, cells, Recipe(dtype == torch.float64, each=each), dtype, device, out)


def geometric(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    p: float = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """A block of the number of trials up to the first success, of probability `p`: 1 or more."""
    if not 0 < p <= 1:
        raise LayoutError(
            f"geometric with p={p}.", why="a success has a probability in (0, 1]", fix="give such a p"
        )
    scale = 0.0 if p == 1 else -1 / math.log1p(-p)
    if dtype in PRECISION:
        most = torch.finfo(dtype).max
    elif dtype == torch.bool:
        most = 1
    else:
        most = last_below(torch.iinfo(dtype).max + 1, torch.float64)

    def each(word: Array) -> Array:
        out = ln(half_open(word), scale=-1.0, power=63)
        out *= scale
        out = np.ceil(out, out=out) if isinstance(out, np.ndarray) else out.ceil_()
        return at_most(at_least(out, 1.0), most)

    return fill(draw, cells, Recipe(True, each=each), dtype, device, out)


def cauchy(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    median: float = 0.0,
    sigma: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """A block of Cauchy numbers: tangents of a uniform angle.

    A word's first bit is the sign, its second whether the tangent of an angle up to 45 degrees or its inverse.
    """
    precision(dtype, "cauchy")

    def each(word: Array) -> Array:
        word = signed(word)
        count = 8 * word.itemsize
        sign = word & (-1 << (count - 1))
        inverse = (word & (1 << (count - 2))) != 0
        word &= (1 << (count - 2)) - 1
        angle = number(word)
        angle += 0.5
        angle *= 2.0 ** (2 - count)
        cos, sin = circle(angle)
        out = choose(inverse, cos, sin) / choose(inverse, sin, cos)
        memory = bits(out)
        memory ^= sign
        if sigma != 1.0:
            out *= sigma
        if median != 0.0:
            out += median
        return out

    return fill(draw, cells, Recipe(dtype == torch.float64, each=each), dtype, device, out)
