"""The few things NumPy and torch write differently, so that a distribution is written once for both.

An array is a NumPy array, on the CPU's fast path, or a torch tensor on any device. A word is 32 random bits: uint32
in NumPy, and int32 in torch, which has no arithmetic for uint32. A wide word is 64 of them, as int64 in both.
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
    "below",
    "bits",
    "choose",
    "number",
    "real",
    "root",
    "signed",
    "top",
]

Array = Any

_real_of = {"int32": np.float32, "uint32": np.float32, "int64": np.float64}
_bits_of = {"float32": np.int32, "float64": np.int64}


def top(word: Array, count: int) -> Array:
    """The upper bits of words, as non-negative ints (int32 of words, int64 of wide ones). May overwrite the words."""
    if isinstance(word, np.ndarray):
        if word.dtype == np.int64:
            word = word.view(np.uint64)
        word >>= word.dtype.type(8 * word.itemsize - count)
        return word.view(np.int32 if word.itemsize == 4 else np.int64)
    return word >> (8 * word.element_size() - count) & ((1 << count) - 1)


def below(word: Array, limit: int) -> Array:
    """Where 32-bit words are below a limit from 0 to 2**32."""
    if isinstance(word, np.ndarray):
        return word < np.uint32(limit) if limit < 2**32 else np.ones(word.shape, np.bool_)
    return (word.to(torch.int64) & 0xFFFFFFFF) < limit


def number(whole: Array) -> Array:
    """Ints as floats of their width, rounded to nearest: float32 of int32, float64 of int64."""
    if isinstance(whole, np.ndarray):
        return whole.astype(_real_of[whole.dtype.name])
    return whole.to(torch.float32 if whole.dtype == torch.int32 else torch.float64)


def bits(value: Array) -> Array:
    """The memory of floats, as ints."""
    if isinstance(value, np.ndarray):
        return value.view(_bits_of[value.dtype.name])
    return value.view(torch.int32 if value.dtype == torch.float32 else torch.int64)


def real(memory: Array) -> Array:
    """Ints as the floats whose memory they are."""
    if isinstance(memory, np.ndarray):
        return memory.view(_real_of[memory.dtype.name])
    return memory.view(torch.float32 if memory.dtype == torch.int32 else torch.float64)


def signed(word: Array) -> Array:
    """Words as signed ints, the same memory."""
    if isinstance(word, np.ndarray) and word.dtype == np.uint32:
        return word.view(np.int32)
    return word


def root(value: Array) -> Array:
    """The square root, in place."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.sqrt_()
    # on the CPU torch takes a library's, whose last bit is off for one number in five
    memory = value.numpy() if isinstance(value, Tensor) else value
    np.sqrt(memory, out=memory)
    return value


def at_least(value: Array, least: float) -> Array:
    """Values raised to a bound, in place."""
    if isinstance(value, np.ndarray):
        return np.maximum(value, value.dtype.type(least), out=value)
    return value.clamp_(min=least)


def at_most(value: Array, most: float) -> Array:
    """Values lowered to a bound, in place."""
    if isinstance(value, np.ndarray):
        return np.minimum(value, value.dtype.type(most), out=value)
    return value.clamp_(max=most)


def choose(condition: Array, yes: Array, no: Array) -> Array:
    """One value where a condition holds, the other elsewhere."""
    return (
        np.where(condition, yes, no) if isinstance(condition, np.ndarray) else torch.where(condition, yes, no)
    )
