"""Exponential, geometric and Cauchy numbers, each computed from one word by inversion."""

from __future__ import annotations

import math

import numpy as np
import torch

from shardwise.random.fill import Recipe, distribution
from shardwise.random.normal import half_open
from shardwise.random.numpy_or_torch import Array, at_least, at_most, float_bits, select, signed, to_float
from shardwise.random.portable_math import cos_sin, ln
from shardwise.random.uniform import PRECISION, last_below, precision

__all__ = ["cauchy", "exponential", "geometric"]


@distribution
def exponential(dtype: torch.dtype, lambd: float = 1.0) -> Recipe:
    """A block of exponential numbers with rate `lambd`, all greater than 0.

    >>> from shardwise.random import BlockIndices, Draw
    >>> bool((exponential(Draw(7, 0), BlockIndices((100,)), torch.float32, lambd=2.0) > 0).all())
    True
    """
    precision(dtype, "exponential")
    least = torch.finfo(dtype).smallest_normal if dtype != torch.float16 else 2.0**-24

    def values(word: Array) -> Array:
        power = 8 * word.itemsize - 1
        out = ln(half_open(word), scale=-1.0, power=power)
        at_least(out, 2.0 ** -(power + 2))  # half_open can be 1, whose logarithm is 0
        if lambd != 1.0:
            out *= 1 / lambd
        return at_least(out, least)

    return Recipe(dtype == torch.float64, values)


@distribution
def geometric(dtype: torch.dtype, p: float = 0.5) -> Recipe:
    """A block of the numbers of trials up to and including the first success, which has probability `p`."""
    scale = 0.0 if p == 1 else -1 / math.log1p(-p)
    if dtype in PRECISION:
        most = torch.finfo(dtype).max
    elif dtype == torch.bool:
        most = 1
    else:
        most = last_below(torch.iinfo(dtype).max + 1, torch.float64)

    def values(word: Array) -> Array:
        out = ln(half_open(word), scale=-1.0, power=63)
        out *= scale
        out = np.ceil(out, out=out) if isinstance(out, np.ndarray) else out.ceil_()
        return at_most(at_least(out, 1.0), most)

    return Recipe(True, values)


@distribution
def cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Recipe:
    """A block of Cauchy numbers: tangents of a uniform angle.

    The highest bit of a word is the sign, the next one selects the tangent or the cotangent of an angle up to 45
    degrees, and the rest are the angle.
    """
    precision(dtype, "cauchy")

    def values(word: Array) -> Array:
        word = signed(word)
        count = 8 * word.itemsize
        sign = word & (-1 << (count - 1))
        inverse = (word & (1 << (count - 2))) != 0
        word &= (1 << (count - 2)) - 1
        angle = to_float(word)
        angle += 0.5
        angle *= 2.0 ** (2 - count)
        cos, sin = cos_sin(angle)
        out = select(inverse, cos, sin) / select(inverse, sin, cos)
        pattern = float_bits(out)
        pattern ^= sign
        if sigma != 1.0:
            out *= sigma
        if median != 0.0:
            out += median
        return out

    return Recipe(dtype == torch.float64, values)
