"""Whole numbers in a range, and yes or no with a probability."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.fill import Recipe, fill, parts
from shardwise.random.numpy_or_torch import Array, at_least, at_most, below, choose, number, top
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
    """A block of ones, each with probability `p`, and zeros; `p` is a number or a tensor of the block's shape.

    An element is one if its word, as a number below 2**32, is below `p * 2**32`.

    >>> bernoulli(Draw(7, 0), Cells((2, 3)), torch.bool, p=0.5)
    tensor([[False, False,  True],
            [ True,  True, False]])
    """
    if isinstance(p, Tensor):
        return _each_bernoulli(draw, cells, dtype, device, p, out)
    if not 0 <= p <= 1:
        raise LayoutError(f"bernoulli with p={p}.", why="a probability is from 0 to 1", fix="give such a p")
    limit = math.ceil(p * 2**32)
    return fill(draw, cells, Recipe(False, each=lambda word: below(word, limit)), dtype, device, out)


@torch.no_grad()
def _each_bernoulli(
    draw: Draw, cells: Cells, dtype: torch.dtype, device: torch.device | str, p: Tensor, out: Tensor | None
) -> Tensor:
    if tuple(p.shape) != cells.shape:
        raise LayoutError(
            f"bernoulli of probabilities of shape {tuple(p.shape)} for a block of shape {cells.shape}.",
            why="each element has a probability of its own",
            fix="expand the probabilities to the block's shape",
        )
    if p.numel() and not bool(((p >= 0) & (p <= 1)).all()):
        raise LayoutError(
            "bernoulli with p outside 0..1.", why="a probability is from 0 to 1", fix="clamp it"
        )
    words = fill(draw, cells, Recipe(False, each=lambda word: word), torch.int32, device).view(-1)
    if out is None:
        out = torch.empty(cells.shape, dtype=dtype, device=device)
    flat, chances = out.view(-1), p.reshape(-1)
    for lo, hi in parts(cells.numel, p.device):
        part = slice(lo, hi)
        flat[part] = (words[part].to(torch.int64) & _LOW) < chances[part].to(torch.float64) * 2**32
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
    """A block of whole numbers from `low` up to, but never equal to, `high`.

    A 64-bit word is scaled to ranges below 2**31, and reduced modulo larger ones; no number is favoured by more
    than 2**-32 of its probability below 2**31, and by range / 2**63 above, where torch has range / 2**64.

    >>> integers(Draw(7, 0), Cells((6,)), torch.int64, low=-2, high=3)
    tensor([ 1, -2,  1,  2, -2,  2])
    """
    if not low < high or high - low > 2**64:
        raise LayoutError(
            f"integers from {low} to {high}.", why="the range holds none, or too many", fix="order them"
        )
    _, most = random_range(dtype, None, None)
    if dtype not in PRECISION and not (_least(dtype) <= low and high <= most):
        raise LayoutError(
            f"integers from {low} to {high} as {dtype}.",
            why=f"it holds {_least(dtype)}..{most - 1}",
            fix="use a wider dtype",
        )
    count = high - low
    exact = dtype not in PRECISION or max(abs(low), abs(high)) <= 2 ** PRECISION[dtype]

    def each(word: Array) -> Array:
        out = _scaled(word, count) if count < 2**31 else _reduced(word, count)
        if low:
            out += low if low < 2**63 else low - 2**64
        if exact:
            return out
        out = number(out)
        at_most(out, last_below(high, dtype))
        near = torch.tensor(low, dtype=dtype, device="cpu").item()
        return at_least(out, -last_below(-low, dtype) if near < low else low)

    return fill(draw, cells, Recipe(True, each=each), dtype, device, out)


def _scaled(word: Array, count: int) -> Array:
    """The upper 64 bits of a product of 64 and 31 bits: long multiplication, as no step may pass 2**63."""
    low = word & _LOW
    low *= count
    low >>= 32
    word >>= 32
    word &= _LOW
    word *= count
    word += low
    word >>= 32
    return word


def _reduced(word: Array, count: int) -> Array:
    if count <= 2**63:
        word = top(word, 63)
        if count < 2**63:
            word %= count
        return word
    if count < 2**64:
        flip = -(2**63)  # unsigned order is the signed order of words with the first bit flipped
        beyond = (word ^ flip) >= count - 2**63
        word = choose(beyond, word + (2**64 - count), word)
    return word


def _least(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def random_range(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    """The range of `random_` where it is not told: from 0, up to and with the largest int, or 2**mantissa of floats.

    >>> random_range(torch.uint8, None, None), random_range(torch.float16, None, None), random_range(torch.bool, None, None)
    ((0, 256), (0, 2049), (0, 2))
    """
    if high is None:
        if dtype == torch.bool:
            high = 2
        else:
            high = (2 ** PRECISION[dtype] if dtype in PRECISION else torch.iinfo(dtype).max) + 1
    return low or 0, high
