"""Rejection sampling: each element makes attempts until one is accepted.

Attempt r of element i uses the Philox block with number i in lane r, so the result does not depend on which other
elements are in the block. All arithmetic is float64 in terms of `portable_math`, so that all devices accept the same
attempts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import shardwise.random.portable_math as portable_math
from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import MAX_ELEMENTS, BlockIndices
from shardwise.random.fill import parts
from shardwise.random.normal import half_open
from shardwise.random.philox import Draw, counters, philox

__all__ = ["Attempts", "attempts_by_part", "exp", "log", "positions_where", "take"]


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Some elements of a 1-d tensor."""
    return x.index_select(0, positions)  # x[positions] starts torch's threads for a few thousand elements


def positions_where(condition: Tensor) -> Tensor:
    """The positions where a condition holds."""
    return condition.nonzero().view(-1)


Attempt = Callable[..., tuple[Tensor, Tensor]]
"""`attempt(attempts, positions, *parameters)`: the numbers of some elements, and whether each is accepted."""


class Attempts:
    """The random words of some elements, given by their global indices; each request uses the next lane."""

    def __init__(self, draw: Draw, index: Tensor) -> None:
        self._draw, self._index, self._lane = draw, index, 0

    def words(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two new wide words for each of the elements at some positions."""
        self._lane += 1
        if self._lane >= 2**16:
            raise RuntimeError(
                "A random number was not accepted in 65535 attempts, so a parameter must be NaN or infinite."
            )
        counter = counters(self._draw, take(self._index, positions), self._lane)
        a, b, c, d = philox(counter, self._draw.seed)
        return a | b << 32, c | d << 32

    def uniforms(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two new uniform numbers in (0, 1] for each of the elements at some positions."""
        first, second = self.words(positions)
        return half_open(first) * 2.0**-63, half_open(second) * 2.0**-63

    def until_accepted(self, positions: Tensor, out: Tensor, attempt: Attempt, *parameters: Tensor) -> None:
        """Repeat an attempt until each element at some positions has a number, and write the numbers to `out`."""
        while positions.numel():
            value, accepted = attempt(self, positions, *(take(p, positions) for p in parameters))
            done = positions_where(accepted)
            out.index_copy_(0, take(positions, done), take(value, done))
            positions = take(positions, positions_where(~accepted))


def attempts_by_part(
    draw: Draw, indices: BlockIndices, *parameters: Tensor
) -> Iterator[tuple[slice, Attempts, list[Tensor]]]:
    """Per part of a block: its position, the attempts of its elements, and their parameters as float64."""
    if 2 * math.prod(indices.full_shape) > MAX_ELEMENTS:
        raise LayoutError(
            f"Numbers by rejection were requested for a tensor of shape {indices.full_shape}.",
            why="each element uses a Philox block of its own, and there are 2**48 of them",
            fix="fill slices of the tensor in several calls: [torch.poisson(part) for part in rates.split(rows)]",
        )
    flat = [tensor.reshape(-1) for tensor in parameters]
    device = parameters[0].device
    for lo, hi in parts(indices.numel, device):
        index = torch.from_numpy(indices.linear(lo, hi)).to(device)
        yield slice(lo, hi), Attempts(draw, index), [tensor[lo:hi].to(torch.float64) for tensor in flat]


def log(x: Tensor) -> Tensor:
    """The natural logarithm, out of place."""
    out: Tensor = portable_math.ln(x.clone())
    return out


def exp(x: Tensor) -> Tensor:
    """The exponential function, out of place."""
    out: Tensor = portable_math.exp(x.clone())
    return out
