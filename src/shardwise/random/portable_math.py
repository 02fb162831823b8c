"""Logarithm, exponential, cosine and sine with the same bits in NumPy and torch, on every device.

Library versions of log or cos differ in the last bit between devices, libraries and vector widths, and even with the
alignment of the data. These use only +, -, *, / and bit operations, each rounded once. Polynomials are evaluated in
separate steps `x *= y; x += c`, which cannot be fused into a multiply-add.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwise.random.numpy_or_torch import Array, float_bits, from_bits, to_float

__all__ = ["cos_sin", "exp", "ln"]


class _Format(NamedTuple):
    """Constants of float32 or float64; polynomial coefficients are listed from the highest power down."""

    mantissa: int
    sqrt_half: int  # bit pattern of sqrt(1/2)
    one: int  # bit pattern of 1
    ln2_high: float  # ln 2 with few enough bits that its product with an exponent is exact
    ln2_low: float  # ln 2 - ln2_high
    ln: tuple[float, ...]  # 2 atanh(s) / s in s * s, for s * s up to 0.0295
    sin: tuple[float, ...]  # sin(pi/4 y) / y in y * y, for y * y up to 1
    cos: tuple[float, ...]  # cos(pi/4 y) in y * y, for y * y up to 1
    exp: tuple[float, ...]  # exp(x), for |x| up to ln(2) / 2


_QUARTER = math.pi / 4

# float32: interpolation at Chebyshev nodes, rounded. float64: the Taylor series down to terms below 1e-17.
_FLOAT32 = _Format(
    mantissa=23,
    sqrt_half=0x3F3504F3,
    one=0x3F800000,
    ln2_high=0.693359375,
    ln2_low=math.log(2) - 0.693359375,
    ln=(0.29924389719963074, 0.3997485041618347, 0.666668176651001, 2.0),
    sin=(-3.595429006963968e-05, 0.0024900068528950214, -0.08074543625116348, 0.7853981852531433),
    cos=(-0.00031916022999212146, 0.015850402414798737, -0.3084245026111603, 1.0),
    exp=tuple(1 / math.factorial(k) for k in reversed(range(8))),
)
_FLOAT64 = _Format(
    mantissa=52,
    sqrt_half=0x3FE6A09E667F3BCD,
    one=0x3FF0000000000000,
    ln2_high=0.6931471803691238,
    ln2_low=1.9082149292705877e-10,
    ln=tuple(2 / (2 * k + 1) for k in reversed(range(12))),
    sin=tuple((-1) ** k * _QUARTER ** (2 * k + 1) / math.factorial(2 * k + 1) for k in reversed(range(9))),
    cos=tuple((-1) ** k * _QUARTER ** (2 * k) / math.factorial(2 * k) for k in reversed(range(10))),
    exp=tuple(1 / math.factorial(k) for k in reversed(range(15))),
)


def _format(x: Array) -> _Format:
    return _FLOAT32 if x.itemsize == 4 else _FLOAT64


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    first, *rest, last = coefficients
    out = x * first
    for c in rest:
        out += c
        out *= x
    out += last
    return out


def ln(x: Array, scale: float = 1.0, power: int = 0) -> Array:
    """`scale` times the natural logarithm of `x / 2**power`, for positive normal floats; overwrites `x`."""
    f = _format(x)
    pattern = float_bits(x)
    pattern -= f.sqrt_half + (power << f.mantissa)
    exponent = pattern >> f.mantissa
    pattern &= (1 << f.mantissa) - 1
    pattern += f.sqrt_half
    x -= 1.0  # exact, as x is from sqrt(1/2) to sqrt(2)
    s = x + 2.0
    x /= s
    s = x * x
    out = _polynomial(s, tuple(scale * c for c in f.ln))
    out *= x
    term = to_float(exponent)
    term *= scale * math.log(2)
    out += term
    return out


def cos_sin(y: Array) -> tuple[Array, Array]:
    """cos(pi/4 y) and sin(pi/4 y), for y from -1 to 1."""
    f = _format(y)
    square = y * y
    cos, sin = _polynomial(square, f.cos), _polynomial(square, f.sin)
    sin *= y
    return cos, sin


def exp(x: Array) -> Array:
    """The exponential function: inf above the largest float, 0 below the smallest normal one; overwrites `x`."""
    f = _format(x)
    bias = f.one >> f.mantissa
    shift = 1.5 * 2.0**f.mantissa  # adding it rounds to an integer and leaves that in the lowest bits
    shift_bits = f.one + (f.mantissa << f.mantissa) + (1 << (f.mantissa - 1))
    overflow = x > (bias + 1) * math.log(2)
    underflow = x < (1 - bias) * math.log(2)
    x[overflow | underflow] = 0.0
    rounded = x * (1 / math.log(2))
    rounded += shift
    exponent = float_bits(rounded) - shift_bits
    rounded -= shift
    x -= rounded * f.ln2_high
    rounded *= f.ln2_low
    x -= rounded
    out = _polynomial(x, f.exp)
    # in two steps, because 2**exponent can be out of range although the product is not
    half = exponent >> 1
    exponent -= half
    for power in (half, exponent):
        power += bias
        power <<= f.mantissa
        out *= from_bits(power)
    out[overflow] = math.inf
    out[underflow] = 0.0
    return out
