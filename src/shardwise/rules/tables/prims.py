"""Ops of torch's `prims`, into which its reference implementations decompose: pointwise ones of tensors of one shape."""

from __future__ import annotations

from shardwise.rules.rule import Row
from shardwise.rules.tables import view_and_cat
from shardwise.rules.tables.pointwise import pointwise

__all__ = ["ROWS"]


def _names(text: str) -> list[str]:
    return [f"prims.{name}.default" for name in text.split()]


ROWS: dict[str, Row] = {
    "prims.view_of.default": view_and_cat.ROWS["aten.alias.default"],
    **dict.fromkeys(_names("add sub"), pointwise(linear=[[0, 1]])),
    "prims.mul.default": pointwise(linear=[[0], [1]]),
    "prims.div.default": pointwise(linear=[[0]]),
    "prims.neg.default": pointwise(linear=[[0]], monotone="decreasing"),
    "prims.maximum.default": pointwise(jointly=("max",), singly=("max", "min")),
    "prims.minimum.default": pointwise(jointly=("min",), singly=("max", "min")),
    **dict.fromkeys(
        _names(
            "abs acos acosh asin asinh atan atanh cos cosh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 "
            "bitwise_not cbrt ceil conj_physical digamma erf erf_inv erfc erfcx exp expm1 exp2 floor imag isfinite lgamma "
            "log log1p log2 log10 ndtri real reciprocal round sign sin sinh spherical_bessel_j0 sqrt tan tanh "
            "trunc atan2 bitwise_and bitwise_or bitwise_xor eq fmax fmin fmod gcd ge gt hypot igamma igammac le lt ne "
            "nextafter pow remainder rsqrt shift_left shift_right_arithmetic zeta"
        ),
        pointwise(),
    ),
}
