"""Tries: the words of numbers that are made by rejection, which may take several.

Whether a try is accepted differs from element to element, so each element has tries of its own: try r of element i
is the philox block with number i in lane r, whatever other elements are in the block of the tensor.
Everything is float64 and by `elementary` alone, so that all devices accept the same tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import MOST, Cells
from shardwise.random.fill import parts
from shardwise.random.normal import half_open
from shardwise.random.philox import Draw, counters, philox
from shardwise.random.portable_math import exp, ln

__all__ = ["Tries", "Try", "log", "parts_of", "pick", "power", "where"]

Try = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The numbers of some elements (by their place in the part) at a try, and which of them are accepted."""


def pick(x: Tensor, places: Tensor) -> Tensor:
    """Some elements of a tensor of one dim."""
    return x.index_select(0, places)  # x[places] would wake torch's threads for a few thousand elements


def where(condition: Tensor) -> Tensor:
    """The places where a condition holds."""
    return condition.nonzero().view(-1)


class Tries:
    """The random words of a part of a block, by try."""

    def __init__(self, draw: Draw, index: Tensor) -> None:
        self._draw, self._index, self.lane = draw, index, 0

    def words(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Two new wide words for each of some elements."""
        self.lane += 1
        if self.lane >= 2**16:
            raise RuntimeError(
                "a random number was not accepted in 65535 tries, which happens with NaN or infinity only"
            )
        a, b, c, d = philox(counters(self._draw, pick(self._index, places), self.lane), self._draw.seed)
        return a | b << 32, c | d << 32

    def uniforms(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Two new numbers in (0, 1] for each of some elements."""
        first, second = self.words(places)
        return half_open(first) * 2.0**-63, half_open(second) * 2.0**-63

    def until_accepted(self, places: Tensor, attempt: Try, out: Tensor) -> None:
        """Tries for some elements until each has a number, which is then in `out`."""
        while places.numel():
            value, accepted = attempt(places)
            yes = where(accepted)
            out.index_copy_(0, pick(places, yes), pick(value, yes))
            places = pick(places, where(~accepted))


def parts_of(draw: Draw, cells: Cells, *given: Tensor) -> Iterator[tuple[slice, Tries, list[Tensor]]]:
    """A block in parts: where each is, its tries, and what is given for its elements as float64."""
    for tensor in given:
        if tuple(tensor.shape) != cells.shape:
            raise LayoutError(
                f"parameters of shape {tuple(tensor.shape)} for a block of shape {cells.shape}.",
                why="each element has parameters of its own",
                fix="expand them to the block's shape",
            )
    if 2 * math.prod(cells.whole) > MOST:
        raise LayoutError(
            f"no such numbers for a tensor of shape {cells.whole}.",
            why="each element has a philox block of its own, and these have 48-bit numbers",
            fix="draw it in several calls",
        )
    flats = [tensor.reshape(-1) for tensor in given]
    for lo, hi in parts(cells.numel, given[0].device):
        index = torch.from_numpy(cells.linear(lo, hi)).to(given[0].device)
        yield slice(lo, hi), Tries(draw, index), [flat[lo:hi].to(torch.float64) for flat in flats]


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    logarithm: Tensor = ln(x.clone())
    return logarithm


def power(x: Tensor) -> Tensor:
    """The exponential function."""
    power: Tensor = exp(x.clone())
    return power
