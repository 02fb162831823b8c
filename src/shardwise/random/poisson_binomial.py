"""Poisson and binomial numbers, exactly: by inversion where few numbers are likely, else by rejection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.layout.errors import LayoutError
from shardwise.random.block_indices import Cells
from shardwise.random.numpy_or_torch import root
from shardwise.random.philox import Draw
from shardwise.random.rejection import Tries, log, parts_of, pick, power, where

__all__ = ["binomial", "log_factorial", "poisson"]

_FEW = 10.0  # up to this mean the numbers are few enough to go through
_NEVER = 200  # numbers of such a mean are below this but for rounding


# Poisson


@torch.no_grad()
def poisson(draw: Draw, cells: Cells, rates: Tensor) -> Tensor:
    """A block of Poisson numbers, in the dtype of their rates, which are a tensor of the block's shape.

    >>> poisson(Draw(7, 0), Cells((4,)), torch.tensor([0.0, 2.0, 50.0, 1e6]))
    tensor([...])
    """
    if rates.numel() and not bool(((rates >= 0) & rates.isfinite()).all()):
        raise LayoutError(
            "poisson with a rate that is negative or not finite.",
            why="there is no such number",
            fix="clamp the rates",
        )
    out = torch.empty(cells.numel, dtype=rates.dtype, device=rates.device)
    for part, tries, (rate,) in parts_of(draw, cells, rates):
        value = torch.zeros_like(rate)
        few = rate < _FEW
        _count_up(where(few), tries, value, power(-torch.where(few, rate, 0.0)), rate, None)

        def attempt(at: Tensor, rate: Tensor = rate, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_poisson(pick(rate, at), *tries.uniforms(at))

        tries.until_accepted(where(~few), attempt, value)
        out[part] = value
    return out.view(cells.shape)


def _count_up(
    places: Tensor, tries: Tries, out: Tensor, none: Tensor, ratio: Tensor, count: Tensor | None
) -> None:
    """Inversion: the first number up to which the probabilities, from that of 0 on, reach a uniform number.

    The probability of k is that of k - 1 times ratio / k, and times count - k + 1 where there is a count.
    """
    left, _ = tries.uniforms(places)
    chance, k = pick(none, places), 0
    while places.numel() and k < _NEVER:
        left = left - chance
        reached = pick(places, where(left <= 0))
        out.index_copy_(0, reached, torch.full_like(reached, k, dtype=out.dtype))
        on = where(left > 0)
        places, left, chance = pick(places, on), pick(left, on), pick(chance, on)
        if count is not None:
            chance *= pick(count, places) - float(k)
        k += 1
        chance *= pick(ratio, places)
        chance *= 1.0 / k
    out.index_copy_(0, places, torch.full_like(places, k, dtype=out.dtype))


def _try_poisson(rate: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """PTRS: W. Hörmann, The transformed rejection method for generating Poisson random variables, 1993."""
    b = 2.53 * root(rate.clone())
    b += 0.931
    a = 0.02483 * b
    a -= 0.059
    u = u - 0.5
    us = (0.5 - u.abs()).clamp_(min=2.0**-60)
    k = 2.0 * a / us
    k += b
    k *= u
    k += rate
    k += 0.43
    k.floor_()
    inverse = 1.1328 / (b - 3.4)
    inverse += 1.1239
    quick = 3.6224 / (b - 2.0)
    quick = 0.9277 - quick
    inside = (us >= 0.07) & (v <= quick)
    outside = (k < 0) | ((us < 0.013) & (v > us))
    whole = k.clamp(min=0.0)
    scale = a / (us * us)
    scale += b
    left = log(v * inverse / scale)
    right = whole * log(rate)
    right -= rate
    right -= log_factorial(whole)
    return k, inside | (~outside & (left <= right))


# Binomial


@torch.no_grad()
def binomial(draw: Draw, cells: Cells, count: Tensor, prob: Tensor) -> Tensor:
    """A block of the number of successes in `count` trials of probability `prob`, both of the block's shape."""
    if prob.numel() and not bool(((prob >= 0) & (prob <= 1) & (count >= 0) & count.isfinite()).all()):
        raise LayoutError(
            "binomial with a negative count or a probability outside 0..1.",
            why="there are no such trials",
            fix="clamp the parameters",
        )
    out = torch.empty(cells.numel, dtype=count.dtype, device=count.device)
    for part, tries, (n, p) in parts_of(draw, cells, count, prob):
        n = n.floor()
        flipped = p > 0.5
        p = torch.where(flipped, 1.0 - p, p)
        value = torch.zeros_like(n)
        few = n * p < _FEW
        none = power(torch.where(few, n, 0.0) * log(1.0 - p))
        _count_up(where(few), tries, value, none, p / (1.0 - p), n)

        def attempt(at: Tensor, n: Tensor = n, p: Tensor = p, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_binomial(pick(n, at), pick(p, at), *tries.uniforms(at))

        tries.until_accepted(where(~few), attempt, value)
        value = torch.minimum(value, n)
        out[part] = torch.where(flipped, n - value, value)
    return out.view(cells.shape)


def _try_binomial(n: Tensor, p: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """BTRS: W. Hörmann, The generation of binomial random variates, 1993."""
    spread = root(n * p * (1.0 - p))
    b = 2.53 * spread
    b += 1.15
    a = 0.0248 * b
    a += 0.01 * p
    a -= 0.0873
    centre = n * p
    centre += 0.5
    alpha = (5.1 / b + 2.83) * spread
    u = u - 0.5
    us = (0.5 - u.abs()).clamp_(min=2.0**-60)
    k = 2.0 * a / us
    k += b
    k *= u
    k += centre
    k.floor_()
    inside = (us >= 0.07) & (v <= 0.92 - 4.2 / b)
    outside = (k < 0) | (k > n)
    whole = torch.minimum(k.clamp(min=0.0), n)
    mode = ((n + 1.0) * p).floor_()
    scale = a / (us * us)
    scale += b
    left = log(v * alpha / scale)
    right = (whole - mode) * log(p / (1.0 - p))
    right += log_factorial(mode)
    right += log_factorial(n - mode)
    right -= log_factorial(whole)
    right -= log_factorial(n - whole)
    inside &= ~outside
    return k, inside | (~outside & (left <= right))


def log_factorial(k: Tensor) -> Tensor:
    """ln(k!) of whole numbers, by Stirling's series at k + 10."""
    x = k + 10.0
    product = torch.ones_like(k)
    for j in range(1, 10):
        product *= (k + float(j)).clamp_(max=1e30)
    small = k < 100.0
    x = torch.where(small, x, k + 1.0)
    inverse = 1.0 / x
    square = inverse * inverse
    series = square * (1 / 1680)
    series -= 1 / 1260
    series *= square
    series += 1 / 360
    series *= square
    series -= 1 / 12
    out = (x - 0.5) * log(x)
    out -= x
    out += 0.5 * math.log(2 * math.pi)
    out -= series * inverse
    return torch.where(small, out - log(torch.where(small, product, torch.ones_like(k))), out)
