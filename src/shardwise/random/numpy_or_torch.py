"""Array operations that NumPy and torch spell differently, so that each distribution is written once for both.

An array is a NumPy array (the fast path on the CPU) or a torch tensor on any device. A word is 32 random bits: uint32
in NumPy, int32 in torch, which lacks uint32 arithmetic. A wide word is 64 bits: int64 in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Array",
    "at_least",
    "at_most",
    "float_bits",
    "from_bits",
    "less_than",
    "select",
    "signed",
    "sqrt_",
    "to_float",
    "upper_bits",
]

Array = Any

_FLOATS = {"int32": np.float32, "uint32": np.float32, "int64": np.float64}
_INTS = {"float32": np.int32, "float64": np.int64}


def upper_bits(word: Array, count: int) -> Array:
    """The upper `count` bits of words as non-negative ints of the same width. May overwrite the words."""
    if isinstance(word, np.ndarray):
        if word.dtype == np.int64:
            word = word.view(np.uint64)
        word >>= word.dtype.type(8 * word.itemsize - count)
        return word.view(np.int32 if word.itemsize == 4 else np.int64)
    return word >> (8 * word.element_size() - count) & ((1 << count) - 1)


def less_than(word: Array, limit: int) -> Array:
    """Whether each 32-bit word, taken as unsigned, is below a limit from 0 to 2**32."""
    if isinstance(word, np.ndarray):
        return word < np.uint32(limit) if limit < 2**32 else np.ones(word.shape, np.bool_)
    return (word.to(torch.int64) & 0xFFFFFFFF) < limit


def to_float(ints: Array) -> Array:
    """Ints as floats of the same width (float32 for int32, float64 for int64), rounded to nearest."""
    if isinstance(ints, np.ndarray):
        return ints.astype(_FLOATS[ints.dtype.name])
    return ints.to(torch.float32 if ints.dtype == torch.int32 else torch.float64)


def float_bits(value: Array) -> Array:
    """The bit patterns of floats, as a view of ints."""
    if isinstance(value, np.ndarray):
        return value.view(_INTS[value.dtype.name])
    return value.view(torch.int32 if value.dtype == torch.float32 else torch.int64)


def from_bits(pattern: Array) -> Array:
    """The floats with these bit patterns, as a view."""
    if isinstance(pattern, np.ndarray):
        return pattern.view(_FLOATS[pattern.dtype.name])
    return pattern.view(torch.float32 if pattern.dtype == torch.int32 else torch.float64)


def signed(word: Array) -> Array:
    """Words as a view of signed ints."""
    if isinstance(word, np.ndarray) and word.dtype == np.uint32:
        return word.view(np.int32)
    return word


def sqrt_(value: Array) -> Array:
    """The correctly rounded square root, in place."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.sqrt_()
    # torch's CPU kernel calls a vector library whose last bit is off for one float32 in five
    array = value.numpy() if isinstance(value, Tensor) else value
    np.sqrt(array, out=array)
    return value


def at_least(value: Array, bound: float) -> Array:
    """Clamp values from below, in place."""
    if isinstance(value, np.ndarray):
        return np.maximum(value, value.dtype.type(bound), out=value)
    return value.clamp_(min=bound)


def at_most(value: Array, bound: float) -> Array:
    """Clamp values from above, in place."""
    if isinstance(value, np.ndarray):
        return np.minimum(value, value.dtype.type(bound), out=value)
    return value.clamp_(max=bound)


def select(condition: Array, yes: Array, no: Array) -> Array:
    """`yes` where the condition holds, `no` elsewhere."""
    where = np.where if isinstance(condition, np.ndarray) else torch.where
    return where(condition, yes, no)
