"""Logarithm, exponential and circle, by +, -, *, / and bit operations alone, each rounded by itself.

No two devices, libraries or vector widths agree on the last bit of log or cos, and on one machine it may depend on
where in memory a number lies. What is here has the same bits everywhere, in NumPy and in torch alike.
Polynomials are steps `x *= y; x += c`: nothing may fuse them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwise.random.numpy_or_torch import Array, bits, number, real

__all__ = ["circle", "exp", "ln"]


class _Width(NamedTuple):
    """What a polynomial has to know of float32 or float64."""

    mantissa: int
    root_half: int  # the memory of sqrt(1/2)
    one: int  # the memory of 1
    ln: tuple[float, ...]  # of 2 atanh(s) / s in s * s, for s * s up to 0.0295, from the highest power down
    sin: tuple[float, ...]  # of sin(pi/4 y) / y in y * y, for y * y up to 1
    cos: tuple[float, ...]  # of cos(pi/4 y) in y * y, for y * y up to 1
    exp: tuple[float, ...]  # of exp(x), for |x| up to ln(2) / 2


_QUARTER = math.pi / 4

# float32: interpolated at Chebyshev nodes and rounded; float64: the Taylor series until it is below 1e-17.
_NARROW = _Width(
    mantissa=23,
    root_half=0x3F3504F3,
    one=0x3F800000,
    ln=(0.29924389719963074, 0.3997485041618347, 0.666668176651001, 2.0),
    sin=(-3.595429006963968e-05, 0.0024900068528950214, -0.08074543625116348, 0.7853981852531433),
    cos=(-0.00031916022999212146, 0.015850402414798737, -0.3084245026111603, 1.0),
    exp=tuple(1 / math.factorial(k) for k in reversed(range(8))),
)
_WIDE = _Width(
    mantissa=52,
    root_half=0x3FE6A09E667F3BCD,
    one=0x3FF0000000000000,
    ln=tuple(2 / (2 * k + 1) for k in reversed(range(12))),
    sin=tuple((-1) ** k * _QUARTER ** (2 * k + 1) / math.factorial(2 * k + 1) for k in reversed(range(9))),
    cos=tuple((-1) ** k * _QUARTER ** (2 * k) / math.factorial(2 * k) for k in reversed(range(10))),
    exp=tuple(1 / math.factorial(k) for k in reversed(range(15))),
)
_LN2_HIGH = {
    23: 0.693359375,
    52: 0.6931471803691238,
}  # few enough bits that a product with an exponent is exact
_LN2_LOW = {23: math.log(2) - 0.693359375, 52: 1.9082149292705877e-10}


def _width(x: Array) -> _Width:
    return _NARROW if x.itemsize == 4 else _WIDE


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    first, *rest, last = coefficients
    out = x * first
    for c in rest:
        out += c
        out *= x
    out += last
    return out


def ln(x: Array, scale: float = 1.0, power: int = 0) -> Array:
    """The natural logarithm of `x / 2**power`, times `scale`, of positive normal floats; `x` is overwritten."""
    w = _width(x)
    memory = bits(x)
    memory -= w.root_half + (power << w.mantissa)
    exponent = memory >> w.mantissa
    memory &= (1 << w.mantissa) - 1
    memory += w.root_half
    x -= 1.0  # from sqrt(1/2) - 1 to sqrt(2) - 1, and exact
    s = x + 2.0
    x /= s
    s = x * x
    out = _polynomial(s, tuple(scale * c for c in w.ln))
    out *= x
    whole = number(exponent)
    whole *= scale * math.log(2)
    out += whole
    return out


def circle(y: Array) -> tuple[Array, Array]:
    """cos(pi/4 y) and sin(pi/4 y), for y from -1 to 1."""
    w = _width(y)
    square = y * y
    cos, sin = _polynomial(square, w.cos), _polynomial(square, w.sin)
    sin *= y
    return cos, sin


def exp(x: Array) -> Array:
    """The exponential function, infinity above the largest float and 0 below the smallest normal one; `x` is overwritten."""
    w = _width(x)
    bias = w.one >> w.mantissa
    shift = 1.5 * 2.0**w.mantissa  # adding it rounds to a whole number, which its lowest bits then are
    far = x > (bias + 1) * math.log(2)
    low = x < (1 - bias) * math.log(2)
    x[far | low] = 0.0
    whole = x * (1 / math.log(2))
    whole += shift
    exponent = bits(whole) - _shift_memory(w)
    whole -= shift
    part = whole * _LN2_HIGH[w.mantissa]
    x -= part
    whole *= _LN2_LOW[w.mantissa]
    x -= whole
    out = _polynomial(x, w.exp)
    # in two steps, as 2**exponent alone may be out of range where the product is not
    half = exponent >> 1
    exponent -= half
    for power in (half, exponent):
        power += bias
        power <<= w.mantissa
        out *= real(power)
    out[far] = math.inf
    out[low] = 0.0
    return out


def _shift_memory(w: _Width) -> int:
    # the memory of 1.5 * 2**mantissa: the exponent field of 2**mantissa and the first bit of the fraction
    return w.one + (w.mantissa << w.mantissa) + (1 << (w.mantissa - 1))
