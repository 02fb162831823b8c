"""Normal numbers by the Box-Muller transform: the elements 2j and 2j+1 are the coordinates of one point."""

from __future__ import annotations

import math

import torch

from shardwise.random.fill import Recipe, distribution
from shardwise.random.numpy_or_torch import Array, float_bits, signed, sqrt_, to_float, upper_bits
from shardwise.random.portable_math import cos_sin, exp, ln
from shardwise.random.uniform import precision

__all__ = ["box_muller", "half_open", "log_normal", "normal"]


@distribution
def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Recipe:
    """A block of normal numbers; the parts of complex ones have half the variance each, as in torch.

    >>> from shardwise.random import BlockIndices, Draw
    >>> full = normal(Draw(7, 0), BlockIndices((2, 3)), torch.float32)
    >>> torch.equal(full[1:], normal(Draw(7, 0), BlockIndices((2, 3), (range(1, 2), range(3))), torch.float32))
    True
    """
    if dtype.is_complex:
        return _recipe(dtype.to_real(), (mean, 0.0), std * math.sqrt(0.5))
    return _recipe(dtype, (mean, mean), std)


@distribution
def log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Recipe:
    """A block of numbers whose logarithms are normal with this mean and standard deviation."""
    recipe = _recipe(dtype, (mean, mean), std)

    def values(first: Array, second: Array) -> tuple[Array, Array]:
        value, other = recipe.values(first, second)
        return exp(value), exp(other)

    return recipe._replace(values=values)


def _recipe(dtype: torch.dtype, means: tuple[float, float], std: float) -> Recipe:
    """Normal numbers with one mean for the elements 2j and one for the elements 2j+1."""
    precision(dtype, "normal")

    def values(first: Array, second: Array) -> tuple[Array, Array]:
        pair = box_muller(first, second)
        for out, mean in zip(pair, means, strict=True):
            if std != 1.0:
                out *= std
            if mean != 0.0:
                out += mean
        return pair

    return Recipe(dtype == torch.float64, values, paired=True)


def box_muller(first: Array, second: Array) -> tuple[Array, Array]:
    """Two standard normal numbers from two words, which determine the radius and the angle of a point.

    The upper two bits of the second word are the signs of the coordinates; the others are an angle between -45 and 45
    degrees, which is rotated by 45 degrees into the quadrant where both coordinates are positive.
    """
    count = 8 * first.itemsize
    radius = sqrt_(ln(half_open(first), scale=-1.0, power=count - 1))  # times sqrt(1/2), for the rotation
    second = signed(second)
    angle = to_float(second << 2)
    angle *= 2.0 ** (1 - count)
    cos, sin = cos_sin(angle)
    value = cos + sin
    cos -= sin
    value *= radius
    cos *= radius
    sign = -1 << (count - 1)
    pattern = float_bits(value)
    pattern ^= second & sign
    pattern = float_bits(cos)
    second <<= 1
    second &= sign
    pattern ^= second
    return value, cos


def half_open(word: Array) -> Array:
    """Uniform numbers in (0, 1], times 2**31 (2**63 for wide words): the upper 31 (63) bits plus 0.5."""
    out = to_float(upper_bits(word, 8 * word.itemsize - 1))
    out += 0.5
    return out
