"""Uniform integers and Bernoulli numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, fill, parts
from shardwise.random.numpy_or_torch import Array, at_least, at_most, less_than, select, to_float, upper_bits
from shardwise.random.philox import Draw
from shardwise.random.uniform import PRECISION, last_below

__all__ = ["bernoulli", "integers", "random_range"]

_LOW = 0xFFFFFFFF


def bernoulli(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    p: float | Tensor = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """A block of ones with probability `p`, a number or a tensor of the block's shape, and zeros otherwise.

    An element is one if its word, as an unsigned 32-bit integer, is below `p * 2**32`.

    >>> bernoulli(Draw(7, 0), Cells((2, 3)), torch.bool, p=0.5)
    tensor([[False, False,  True],
            [ True,  True, False]])
    """
    if isinstance(p, Tensor):
        return _elementwise_bernoulli(draw, cells, dtype, device, p, out)
    if not 0 <= p <= 1:
        raise LayoutError(
            f"bernoulli got p={p}.", why="a probability must be from 0 to 1", fix="pass 0 <= p <= 1"
        )
    limit = math.ceil(p * 2**32)
    return fill(draw, cells, Recipe(False, lambda word: less_than(word, limit)), dtype, device, out)


@torch.no_grad()
def _elementwise_bernoulli(
    draw: Draw, cells: Cells, dtype: torch.dtype, device: torch.device | str, p: Tensor, out: Tensor | None
) -> Tensor:
    if tuple(p.shape) != cells.shape:
        raise LayoutError(
            f"bernoulli got probabilities of shape {tuple(p.shape)} for a block of shape {cells.shape}.",
            why="each element of the block needs its own probability",
            fix=f"expand the probabilities: p.expand({cells.shape})",
        )
    if p.numel() and not bool(((p >= 0) & (p <= 1)).all()):
        raise LayoutError(
            "bernoulli got a tensor of probabilities with elements outside 0..1.",
            why="a probability must be from 0 to 1",
            fix="clamp the probabilities: p.clamp(0, 1)",
        )
    words = fill(draw, cells, Recipe(False, lambda word: word), torch.int32, device).view(-1)
    if out is None:
        out = torch.empty(cells.shape, dtype=dtype, device=device)
    flat, probabilities = out.view(-1), p.reshape(-1)
    for lo, hi in parts(cells.numel, p.device):
        part = slice(lo, hi)
        flat[part] = (words[part].to(torch.int64) & _LOW) < probabilities[part].to(torch.float64) * 2**32
    return out


def integers(
    draw: Draw,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    low: int = 0,
    high: int = 2,
    out: Tensor | None = None,
) -> Tensor:
    """A block of integers from `low` up to, but excluding, `high`.

    A 64-bit word is scaled to ranges below 2**31 and reduced modulo larger ones. The relative bias of a probability is
    at most 2**-32 below 2**31 and range / 2**63 above, compared to torch's range / 2**64.

    >>> integers(Draw(7, 0), Cells((6,)), torch.int64, low=-2, high=3)
    tensor([ 1, -2,  1,  2, -2,  2])
    """
    if not low < high or high - low > 2**64:
        raise LayoutError(
            f"integers got low={low} and high={high}.",
            why="the range must hold from 1 to 2**64 integers",
            fix="pass low < high <= low + 2**64",
        )
    if dtype not in PRECISION:
        first, last = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if low < first or high > last + 1:
            raise LayoutError(
                f"integers got low={low} and high={high} for a tensor of dtype {dtype}.",
                why=f"{dtype} holds the integers {first}..{last}",
                fix="pass bounds within that range, or a wider dtype",
            )
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

    return fill(draw, cells, Recipe(True, values), dtype, device, out)


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
