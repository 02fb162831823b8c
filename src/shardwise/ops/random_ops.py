"""Random ops as programs: a new tensor is filled, and what is made of the numbers are ops like any others.

They run on DTensors, and on plain tensors where `one_device` is on, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwise.call.variants import returning_form, writing_form
from shardwise.layout import Layout
from shardwise.ops.random_fill import FILLS, Make, check_all, fill, is_elsewhere
from shardwise.random import binomial, gamma, integers, poisson
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import policy

__all__ = ["DRAWS", "draws"]

aten = torch.ops.aten


def _like(fill_: Any, *fixed: Any) -> Callable[..., Tensor]:
    """A new tensor like another one, filled."""

    def run(x: Tensor, *, generator: Any = None, **kwargs: Any) -> Tensor:
        return FILLS[fill_](torch.empty_like(x, **kwargs), *fixed, generator=generator)

    return run


def _integers_like(x: Tensor, *bounds: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    low, high = (0, *bounds)[-2:]
    high = int(high)  # a tensor of one number, in one of the forms
    _check_bounds(low, high, kwargs.get("dtype") or x.dtype)
    out = torch.empty_like(x, **kwargs)
    return fill(aten.randint_like.default, out, partial(integers, low=low, high=high), generator)


def _check_bounds(low: int, high: int, dtype: torch.dtype) -> None:
    torch.randint(low, high, (1,), dtype=dtype, generator=_nobodys)


_nobodys = torch.Generator()


def _copied(fill_: Any) -> Callable[..., Tensor]:
    """The form of a filling op that leaves its argument alone."""

    def run(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        return FILLS[fill_](torch.empty_like(x), *args, generator=generator, **kwargs)

    return run


def _coins(x: Tensor, generator: Any = None) -> Tensor:
    return FILLS[aten.bernoulli_.Tensor](torch.empty_like(x), x, generator=generator)


def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """Normal numbers whose mean or deviation, or both, are tensors."""
    if isinstance(std, Tensor):
        if std.is_complex():
            raise RuntimeError("normal expects standard deviation to be non-complex")
        check_all(std >= 0, "normal expects all elements of std >= 0.0")
    elif std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    like = mean + std  # for its shape and layout
    dtype = (mean if isinstance(mean, Tensor) else std).dtype
    out = FILLS[aten.normal_.default](torch.empty_like(like, dtype=dtype), generator=generator)
    return out.mul_(std).add_(mean)


def _of(number: Callable[..., Tensor]) -> Make:
    """Numbers that come in the dtype of the parameters that they have for each element."""

    def make(
        draw: Any, cells: Any, dtype: Any, device: Any, *given: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return number(draw, cells, *given)

    return make


def _poisson(rates: Tensor, generator: Any = None) -> Tensor:
    check_all(rates >= 0, "invalid Poisson rate, expected rate to be non-negative")
    return fill(aten.poisson.default, torch.empty_like(rates), _of(poisson), generator, rates)


def _binomial(count: Tensor, chance: Tensor, generator: Any = None) -> Tensor:
    check_all((count >= 0) & (count == count.floor()), "binomial expects whole, non-negative counts")
    check_all((chance >= 0) & (chance <= 1), "binomial expects probabilities from 0 to 1")
    like = count + chance  # for its shape and layout
    out = torch.empty_like(like, dtype=count.dtype)
    return fill(aten.binomial.default, out, _of(binomial), generator, count, chance)


def _gamma(alpha: Tensor, generator: Any = None) -> Tensor:
    check_all(alpha > 0, "_standard_gamma expects positive concentrations")
    return fill(aten._standard_gamma.default, torch.empty_like(alpha), _of(gamma), generator, alpha)


def _dirichlet(alpha: Tensor, generator: Any = None) -> Tensor:
    drawn = _gamma(alpha, generator)
    return drawn / drawn.sum(-1, keepdim=True)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    _check_chance("dropout", p)
    mask = FILLS[aten.bernoulli_.float](torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _fused_dropout(x: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    """`p` is the chance to stay, and the mask is in bytes."""
    mask = FILLS[aten.bernoulli_.float](torch.empty_like(x, dtype=torch.uint8), p, generator=generator)
    return x * mask * (1 / p), mask


def _check_chance(what: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"{what} probability has to be between 0 and 1, but got {p}")


def _rrelu(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _rrelu_functional(x, noise, *args, **kwargs, into=noise)[0]


def _rrelu_(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(_rrelu(x, noise, *args, **kwargs))


def _rrelu_functional(
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
    *,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    slopes = FILLS[aten.uniform_.default](torch.empty_like(x), lower, upper, generator=generator)
    slopes = torch.where(x <= 0, slopes, 1)
    if into is not None:
        into.copy_(slopes)
    return x * slopes, slopes


def _multinomial(
    chances: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Categories drawn by their weights; the categories of a row are looked at whole, the rows may be split."""
    _check_weights(chances, num_samples, replacement)
    if isinstance(chances, DTensor):
        dims = [*chances.layout.dims[:-1], Layout.replicated(chances.shape, chances.layout.axes).dims[-1]]
        chances = redistributed(chances, chances.layout.with_partial({}).with_dims(dims))
    weights = chances.double()
    if not replacement:
        # the winners of a race in which each category's time is exponential with its weight as rate
        times = FILLS[aten.exponential_.default](torch.empty_like(weights), generator=generator)
        return (weights / times).topk(num_samples, -1).indices
    sums = weights.cumsum(-1)
    total = sums[..., -1:]
    u = _new_of_last(weights, num_samples, generator)
    found = torch.searchsorted(sums, u * total, right=True)
    number = torch.ones_like(weights, dtype=torch.int64).cumsum(-1) - 1
    last = ((weights > 0) * number).amax(-1, keepdim=True)
    return torch.minimum(found, last)  # rounding must not reach past the last that has a weight


def _new_of_last(x: Tensor, count: int, generator: Any) -> Tensor:
    """Uniform numbers in the layout of a tensor but for its last dim, which is whole and of another size."""
    out = torch.empty_like(x[..., :1].expand(*x.shape[:-1], count), memory_format=torch.contiguous_format)
    return FILLS[aten.uniform_.default](out, generator=generator)


def _check_weights(chances: Tensor, count: int, replacement: bool) -> None:
    """Raise as torch does, on all ranks: of the values by an answer that is the whole's."""
    # torch itself checks dims, dtype and counts, on one row of ones
    fits = chances.dim() in (1, 2) and chances.is_floating_point()
    row = (chances.shape[-1],) if fits else (1,) * chances.dim()
    torch.multinomial(torch.ones(row, dtype=chances.dtype), count, replacement, generator=_nobodys)
    if chances.numel() == 0 or is_elsewhere(chances):
        return
    check_all(
        (chances >= 0) & chances.isfinite(), "probability tensor contains either `inf`, `nan` or element < 0"
    )
    with policy(implicit="allow"):
        least = (chances > 0).sum(-1).min().item()
    if least < 1:
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement and least < count:
        raise RuntimeError(
            "invalid multinomial distribution (with replacement=False, not enough non-negative category to sample)"
        )


DRAWS: dict[Any, Callable[..., Any]] = {
    **FILLS,
    **{getattr(aten.rand_like, o): _like(aten.uniform_.default) for o in ("default", "generator")},
    **{getattr(aten.randn_like, o): _like(aten.normal_.default) for o in ("default", "generator")},
    **{
        getattr(aten.randint_like, o): _integers_like
        for o in ("default", "generator", "Tensor", "Tensor_generator", "low_dtype", "low_generator_dtype")
    },
    **{
        getattr(aten, name).default: _copied(getattr(aten, name + "_").default)
        for name in ("uniform", "exponential", "cauchy", "log_normal", "geometric")
    },
    aten.normal_functional.default: _copied(aten.normal_.default),
    aten.random.default: _copied(aten.random_.default),
    aten.random.to: _copied(aten.random_.to),
    getattr(aten.random, "from"): _copied(getattr(aten.random_, "from")),
    aten.bernoulli.default: _coins,
    aten.bernoulli.p: _copied(aten.bernoulli_.float),
    aten.bernoulli.Tensor: _copied(aten.bernoulli_.Tensor),
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.poisson.default: _poisson,
    aten.binomial.default: _binomial,
    aten._standard_gamma.default: _gamma,
    aten._sample_dirichlet.default: _dirichlet,
    aten.native_dropout.default: _native_dropout,
    aten._fused_dropout.default: _fused_dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu_,
    aten.rrelu_with_noise_functional.default: _rrelu_functional,
    aten.multinomial.default: _multinomial,
}
"""By op: how it is run."""


@lru_cache(maxsize=512)
def draws(func: Any) -> Callable[..., Any] | None:
    """How to run a random op by our numbers, or None if it is no such op."""
    known = DRAWS.get(func)
    if known is not None or not any(a.is_out for a in func._schema.arguments):
        return known
    form = returning_form(func)
    return writing_form(func, DRAWS[form]) if form in DRAWS else None
