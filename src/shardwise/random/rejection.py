"""Poisson, binomial and gamma numbers: exact, by inversion where few numbers are likely, else by rejection.

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
from shardwise.random.arrays import root
from shardwise.random.cells import MOST, Cells
from shardwise.random.elementary import exp, ln
from shardwise.random.fill import parts
from shardwise.random.normal import box_muller, half_open
from shardwise.random.philox import Draw, counters, philox

__all__ = ["binomial", "gamma", "poisson"]

_FEW = 10.0  # up to this mean the numbers are few enough to go through
_NEVER = 200  # numbers of such a mean are below this but for rounding

Try = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The numbers of some elements (by their place in the part) at a try, and which of them are accepted."""


def _pick(x: Tensor, places: Tensor) -> Tensor:
    return x.index_select(0, places)  # x[places] would wake torch's threads for a few thousand elements


def _where(condition: Tensor) -> Tensor:
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
        a, b, c, d = philox(counters(self._draw, _pick(self._index, places), self.lane), self._draw.seed)
        return a | b << 32, c | d << 32

    def uniforms(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Two new numbers in (0, 1] for each of some elements."""
        first, second = self.words(places)
        return half_open(first) * 2.0**-63, half_open(second) * 2.0**-63

    def until_accepted(self, places: Tensor, attempt: Try, out: Tensor) -> None:
        """Tries for some elements until each has a number, which is then in `out`."""
        while places.numel():
            value, accepted = attempt(places)
            yes = _where(accepted)
            out.index_copy_(0, _pick(places, yes), _pick(value, yes))
            places = _pick(places, _where(~accepted))


def _parts(draw: Draw, cells: Cells, *given: Tensor) -> Iterator[tuple[slice, Tries, list[Tensor]]]:
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


def _log(x: Tensor) -> Tensor:
    logarithm: Tensor = ln(x.clone())
    return logarithm


def _power(x: Tensor) -> Tensor:
    power: Tensor = exp(x.clone())
    return power


def _log_factorial(k: Tensor) -> Tensor:
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
    out = (x - 0.5) * _log(x)
    out -= x
    out += 0.5 * math.log(2 * math.pi)
    out -= series * inverse
    return torch.where(small, out - _log(torch.where(small, product, torch.ones_like(k))), out)


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
    for part, tries, (rate,) in _parts(draw, cells, rates):
        value = torch.zeros_like(rate)
        few = rate < _FEW
        _count_up(_where(few), tries, value, _power(-torch.where(few, rate, 0.0)), rate, None)

        def attempt(at: Tensor, rate: Tensor = rate, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_poisson(_pick(rate, at), *tries.uniforms(at))

        tries.until_accepted(_where(~few), attempt, value)
        out[part] = value
    return out.view(cells.shape)


def _count_up(
    places: Tensor, tries: Tries, out: Tensor, none: Tensor, ratio: Tensor, count: Tensor | None
) -> None:
    """Inversion: the first number up to which the probabilities, from that of 0 on, reach a uniform number.

    The probability of k is that of k - 1 times ratio / k, and times count - k + 1 where there is a count.
    """
    left, _ = tries.uniforms(places)
    chance, k = _pick(none, places), 0
    while places.numel() and k < _NEVER:
        left = left - chance
        reached = _pick(places, _where(left <= 0))
        out.index_copy_(0, reached, torch.full_like(reached, k, dtype=out.dtype))
        on = _where(left > 0)
        places, left, chance = _pick(places, on), _pick(left, on), _pick(chance, on)
        if count is not None:
            chance *= _pick(count, places) - float(k)
        k += 1
        chance *= _pick(ratio, places)
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
    left = _log(v * inverse / scale)
    right = whole * _log(rate)
    right -= rate
    right -= _log_factorial(whole)
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
    for part, tries, (n, p) in _parts(draw, cells, count, prob):
        n = n.floor()
        flipped = p > 0.5
        p = torch.where(flipped, 1.0 - p, p)
        value = torch.zeros_like(n)
        few = n * p < _FEW
        none = _power(torch.where(few, n, 0.0) * _log(1.0 - p))
        _count_up(_where(few), tries, value, none, p / (1.0 - p), n)

        def attempt(at: Tensor, n: Tensor = n, p: Tensor = p, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_binomial(_pick(n, at), _pick(p, at), *tries.uniforms(at))

        tries.until_accepted(_where(~few), attempt, value)
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
    left = _log(v * alpha / scale)
    right = (whole - mode) * _log(p / (1.0 - p))
    right += _log_factorial(mode)
    right += _log_factorial(n - mode)
    right -= _log_factorial(whole)
    right -= _log_factorial(n - whole)
    inside &= ~outside
    return k, inside | (~outside & (left <= right))


# Gamma


@torch.no_grad()
def gamma(draw: Draw, cells: Cells, alpha: Tensor) -> Tensor:
    """A block of standard gamma numbers, in the dtype of their shape parameters, a tensor of the block's shape."""
    if alpha.numel() and not bool(((alpha > 0) & alpha.isfinite()).all()):
        raise LayoutError(
            "gamma of a shape that is not positive or not finite.",
            why="there is no such number",
            fix="clamp them",
        )
    least = torch.finfo(alpha.dtype).tiny
    out = torch.empty(cells.numel, dtype=alpha.dtype, device=alpha.device)
    for part, tries, (shape,) in _parts(draw, cells, alpha):
        boosted = shape < 1.0
        every = torch.arange(len(shape), device=shape.device)
        boost, _ = tries.uniforms(every)
        shape_up = torch.where(boosted, shape + 1.0, shape)
        value = torch.empty_like(shape)

        def attempt(at: Tensor, shape: Tensor = shape_up, tries: Tries = tries) -> tuple[Tensor, Tensor]:
            return _try_gamma(_pick(shape, at), at, tries)

        tries.until_accepted(every, attempt, value)
        # of shape a: one of shape a + 1 times u**(1/a)
        value *= torch.where(boosted, _power(_log(boost) / shape), 1.0)
        out[part] = value.clamp_(min=least)
    return out.view(cells.shape)


def _try_gamma(shape: Tensor, places: Tensor, tries: Tries) -> tuple[Tensor, Tensor]:
    """G. Marsaglia and W. W. Tsang, A simple method for generating gamma variables, 2000."""
    x, _ = box_muller(*tries.words(places))
    u, _ = tries.uniforms(places)
    d = shape - 1 / 3
    c = 1.0 / (3.0 * root(d.clone()))
    base = 1.0 + c * x
    positive = base > 0
    base = torch.where(positive, base, 1.0)
    v = base * base * base
    square = x * x
    right = 0.5 * square
    right += d
    right -= d * v
    right += d * _log(v)
    return d * v, positive & (_log(u) < right)
