"""Normal numbers, by Box and Muller: the elements 2j and 2j+1 are one point of the plane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, fill
from shardwise.random.numpy_or_torch import Array, bits, number, root, signed, top
from shardwise.random.philox import Draw
from shardwise.random.portable_math import circle, exp, ln
from shardwise.random.uniform import REAL_PART, precision

__all__ = ["log_normal", "normal", "normal_recipe"]


def normal(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mean: float = 0.0,
    std: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """A block of a tensor of normal numbers; of complex ones, each part has half the variance, as torch's.

    >>> whole = normal(Draw(7, 0), Cells((2, 3)), torch.float32)
    >>> torch.equal(whole[1:], normal(Draw(7, 0), Cells((2, 3), (range(1, 2), range(3))), torch.float32))
    True
    """
    if dtype in REAL_PART:
        parts = None if out is None else torch.view_as_real(out)
        parts = normal(draw, cells.pairs(), REAL_PART[dtype], device, 0.0, std * math.sqrt(0.5), parts)
        out = torch.view_as_complex(parts) if out is None else out
        return out.add_(mean) if mean else out
    return fill(draw, cells, normal_recipe(dtype, mean, std), dtype, device, out)


def log_normal(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mean: float = 1.0,
    std: float = 2.0,
    out: Tensor | None = None,
) -> Tensor:
    """A block of a tensor of numbers whose logarithms are normal."""
    wide, _, pair = normal_recipe(dtype, mean, std)

    def powers(first: Array, second: Array) -> tuple[Array, Array]:
        value, other = pair(first, second)  # type: ignore[misc]
        return exp(value), exp(other)

    return fill(draw, cells, Recipe(wide, pair=powers), dtype, device, out)


def normal_recipe(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Recipe:
    """How pairs of words become normal numbers."""
    precision(dtype, "normal")
    wide = dtype == torch.float64

    def pair(first: Array, second: Array) -> tuple[Array, Array]:
        value, other = box_muller(first, second)
        for out in (value, other):
            if std != 1.0:
                out *= std
            if mean != 0.0:
                out += mean
        return value, other

    return Recipe(wide, pair=pair)


def box_muller(first: Array, second: Array) -> tuple[Array, Array]:
    """Two standard normal numbers of two words: the first makes the radius, the second the angle.

    The angle's upper two bits are the signs of the two numbers and the others an angle between -45 and 45 degrees,
    which is turned by 45 degrees, into the quadrant where both are positive.
    """
    count = 8 * first.itemsize
    radius = root(ln(half_open(first), scale=-1.0, power=count - 1))  # sqrt(1/2) of it, as turning takes
    second = signed(second)
    angle = number(second << 2)
    angle *= 2.0 ** (1 - count)
    cos, sin = circle(angle)
    value = cos + sin
    cos -= sin
    value *= radius
    cos *= radius
    sign = -1 << (count - 1)
    memory = bits(value)
    memory ^= second & sign
    memory = bits(cos)
    second <<= 1
    second &= sign
    memory ^= second
    return value, cos


def half_open(word: Array) -> Array:
    """Uniform numbers from 2**-1 up to and with 2**31 (2**63 of wide words): the upper 31 (63) bits, plus a half."""
    out = number(top(word, 8 * word.itemsize - 1))
    out += 0.5
    return out
