"""Exact Poisson and binomial numbers: by inversion for small means, else by rejection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.random.block_indices import BlockIndices
from shardwise.random.numpy_or_torch import sqrt_
from shardwise.random.philox import Draw
from shardwise.random.rejection import Attempts, attempts_by_part, exp, log, positions_where, take

__all__ = ["binomial", "log_factorial", "poisson"]

_INVERSION_MEAN = 10.0  # below it, numbers are found by adding up probabilities
_INVERSION_MAX = 200  # no number of such a mean exceeds it, except by rounding


@torch.no_grad()
def poisson(draw: Draw, indices: BlockIndices, rates: Tensor) -> Tensor:
    """A block of Poisson numbers with these finite rates >= 0, a tensor of the block's shape and dtype.

    >>> poisson(Draw(7, 0), BlockIndices((4,)), torch.tensor([0.0, 2.0, 50.0, 400.0]))
    tensor([  0.,   1.,  54., 394.])
    """
    out = torch.empty(indices.numel, dtype=rates.dtype, device=rates.device)
    for part, attempts, (rate,) in attempts_by_part(draw, indices, rates):
        value = torch.zeros_like(rate)
        small = rate < _INVERSION_MEAN
        _invert(attempts, positions_where(small), value, exp(-torch.where(small, rate, 0.0)), rate, None)
        attempts.until_accepted(positions_where(~small), value, _attempt_poisson, rate)
        out[part] = value
    return out.view(indices.shape)


def _invert(
    attempts: Attempts, positions: Tensor, out: Tensor, zero: Tensor, ratio: Tensor, count: Tensor | None
) -> None:
    """Write to `out` the first k for which the probabilities of 0 to k add up to a uniform number.

    `zero` is the probability of 0. That of k is that of k - 1 times ratio / k, and times count - k + 1 with a count.
    """
    left, _ = attempts.uniforms(positions)
    probability, k = take(zero, positions), 0
    while positions.numel() and k < _INVERSION_MAX:
        left = left - probability
        found = take(positions, positions_where(left <= 0))
        out.index_copy_(0, found, torch.full_like(found, k, dtype=out.dtype))
        rest = positions_where(left > 0)
        positions, left, probability = take(positions, rest), take(left, rest), take(probability, rest)
        if count is not None:
            probability *= take(count, positions) - float(k)
        k += 1
        probability *= take(ratio, positions)
        probability *= 1.0 / k
    out.index_copy_(0, positions, torch.full_like(positions, k, dtype=out.dtype))


def _attempt_poisson(attempts: Attempts, positions: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """PTRS: W. Hörmann, The transformed rejection method for generating Poisson random variables, 1993."""
    u, v = attempts.uniforms(positions)
    b = 2.53 * sqrt_(rate.clone()) + 0.931
    a = 0.02483 * b - 0.059
    u = u - 0.5
    us = (0.5 - u.abs()).clamp_(min=2.0**-60)
    k = ((2.0 * a / us + b) * u + rate + 0.43).floor_()
    inside = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2.0))
    outside = (k < 0) | ((us < 0.013) & (v > us))
    n = k.clamp(min=0.0)
    left = log(v * (1.1328 / (b - 3.4) + 1.1239) / (a / (us * us) + b))
    right = n * log(rate) - rate - log_factorial(n)
    return k, inside | (~outside & (left <= right))


@torch.no_grad()
def binomial(draw: Draw, indices: BlockIndices, count: Tensor, prob: Tensor) -> Tensor:
    """A block of the numbers of successes in `count` trials of probability `prob`, tensors of the block's shape."""
    out = torch.empty(indices.numel, dtype=count.dtype, device=count.device)
    for part, attempts, (n, p) in attempts_by_part(draw, indices, count, prob):
        n = n.floor()
        flipped = p > 0.5
        p = torch.where(flipped, 1.0 - p, p)
        value = torch.zeros_like(n)
        small = n * p < _INVERSION_MEAN
        zero = exp(torch.where(small, n, 0.0) * log(1.0 - p))
        _invert(attempts, positions_where(small), value, zero, p / (1.0 - p), n)
        attempts.until_accepted(positions_where(~small), value, _attempt_binomial, n, p)
        value = torch.minimum(value, n)
        out[part] = torch.where(flipped, n - value, value)
    return out.view(indices.shape)


def _attempt_binomial(attempts: Attempts, positions: Tensor, n: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """BTRS: W. Hörmann, The generation of binomial random variates, 1993."""
    u, v = attempts.uniforms(positions)
    spread = sqrt_(n * p * (1.0 - p))
    b = 2.53 * spread + 1.15
    a = 0.0248 * b + 0.01 * p - 0.0873
    u = u - 0.5
    us = (0.5 - u.abs()).clamp_(min=2.0**-60)
    k = ((2.0 * a / us + b) * u + (n * p + 0.5)).floor_()
    inside = (us >= 0.07) & (v <= 0.92 - 4.2 / b)
    outside = (k < 0) | (k > n)
    m = torch.minimum(k.clamp(min=0.0), n)
    mode = ((n + 1.0) * p).floor_()
    left = log(v * ((5.1 / b + 2.83) * spread) / (a / (us * us) + b))
    right = (m - mode) * log(p / (1.0 - p)) + log_factorial(mode) + log_factorial(n - mode)
    right = right - log_factorial(m) - log_factorial(n - m)
    return k, ~outside & (inside | (left <= right))


def log_factorial(k: Tensor) -> Tensor:
    """ln(k!) of non-negative integers, by Stirling's series at k + 10."""
    x = k + 10.0
    product = torch.ones_like(k)
    for j in range(1, 10):
        product *= (k + float(j)).clamp_(max=1e30)
    small = k < 100.0
    x = torch.where(small, x, k + 1.0)
    inverse = 1.0 / x
    square = inverse * inverse
    series = ((square * (1 / 1680) - 1 / 1260) * square + 1 / 360) * square - 1 / 12
    out = (x - 0.5) * log(x) - x + 0.5 * math.log(2 * math.pi) - series * inverse
    return torch.where(small, out - log(torch.where(small, product, torch.ones_like(k))), out)
