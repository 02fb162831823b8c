"""Uniform integers and Bernoulli numbers; the callers have checked the parameters, on all ranks alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.random.block_indices import BlockIndices
from shardwise.random.fill import Recipe, distribution, fill, parts
from shardwise.random.numpy_or_torch import Array, at_least, at_most, less_than, select, to_float, upper_bits
from shardwise.random.philox import Draw
from shardwise.random.uniform import PRECISION, last_below

__all__ = ["bernoulli", "integers", "random_range"]

_LOW = 0xFFFFFFFF


def bernoulli(
    draw: Draw,
    indices: BlockIndices,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    p: float | Tensor = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """A block of ones with probability `p`, a number or a tensor of the block's shape, and zeros otherwise.

    An element is one if its word, as an unsigned 32-bit integer, is below `p * 2**32`.

    >>> bernoulli(Draw(7, 0), BlockIndices((2, 3)), torch.bool, p=0.5)
    tensor([[False, False,  True],
            [ True,  True, False]])
    """
    if isinstance(p, Tensor):
        return _elementwise_bernoulli(draw, indices, dtype, device, p, out)
    limit = math.ceil(p * 2**32)
    return fill(draw, indices, Recipe(False, lambda word: less_than(word, limit)), dtype, device, out)


@torch.no_grad()
def _elementwise_bernoulli(
    draw: Draw,
    indices: BlockIndices,
    dtype: torch.dtype,
    device: torch.device | str,
    p: Tensor,
    out: Tensor | None,
) -> Tensor:
    words = fill(draw, indices, Recipe(False, lambda word: word), torch.int32, device).view(-1)
    if out is None:
        out = torch.empty(indices.shape, dtype=dtype, device=device)
    flat, probabilities = out.view(-1), p.reshape(-1)
    for lo, hi in parts(indices.numel, p.device):
        part = slice(lo, hi)
        flat[part] = (words[part].to(torch.int64) & _LOW) < probabilities[part].to(torch.float64) * 2**32
    return out


@distribution
def integers(dtype: torch.dtype, low: int = 0, high: int = 2) -> Recipe:
    """A block of integers from `low` up to, but excluding, `high`.

    A 64-bit word is scaled to ranges below 2**31 and reduced modulo larger ones. The relative bias of a probability is
    at most 2**-32 below 2**31 and range / 2**63 above, compared to torch's range / 2**64.

    >>> integers(Draw(7, 0), BlockIndices((6,)), torch.int64, low=-2, high=3)
    tensor([ 1, -2,  1,  2, -2,  2])
    """
    count = high - low
    exact = dtype not in PRECISION or max(abs(low), abs(high)) <= 2 ** PRECISION[dtype]

    def values(word: Array) -> Array:
        out = _scale(word, count) if count < 2**31 else _reduce(word, count)
        if low:
            out += low if low < 2**63 else low - 2**64
        if exact:
            return out
        out = to_float(out)
        at_most(out, last_below(high, dtype))
        near = torch.tensor(low, dtype=dtype, device="cpu").item()
        return at_least(out, -last_below(-low, dtype) if near < low else low)

    return Recipe(True, values)


def _scale(word: Array, count: int) -> Array:
    """The upper 64 bits of `word * count`, by long multiplication, as no intermediate may exceed 2**63."""
    low = word & _LOW
    low *= count
    low >>= 32
    word >>= 32
    word &= _LOW
    word *= count
    word += low
    word >>= 32
    return word


def _reduce(word: Array, count: int) -> Array:
    """The upper 63 bits modulo `count`; for larger counts the word, minus `count` if it is beyond."""
    if count <= 2**63:
        word = upper_bits(word, 63)
        if count < 2**63:
            word %= count
        return word
    if count < 2**64:
        flip = -(2**63)  # unsigned order is the signed order of words with the highest bit flipped
        beyond = (word ^ flip) >= count - 2**63
        word = select(beyond, word + (2**64 - count), word)
    return word


def random_range(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    """The bounds of `random_`: by default from 0 up to and including the largest int, or 2**mantissa for floats.

    >>> random_range(torch.uint8, None, None), random_range(torch.float16, None, None), random_range(torch.bool, None, None)
    ((0, 256), (0, 2049), (0, 2))
    """
    if high is None:
        if dtype == torch.bool:
            high = 2
        else:
            high = (2 ** PRECISION[dtype] if dtype in PRECISION else torch.iinfo(dtype).max) + 1
    return low or 0, high
