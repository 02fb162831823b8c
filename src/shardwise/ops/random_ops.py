"""Random ops as programs: a new tensor is filled, and the rest is computed by other ops.

They run on DTensors, and inside `one_device` on plain tensors, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.call.schema import op_info
from shardwise.call.variants import writing_variant
from shardwise.layout import Layout
from shardwise.ops.random_fill import FILLS, UNUSED, Numbers, check_all, fill, is_off_mesh, value_of
from shardwise.random import binomial, gamma, integers, poisson
from shardwise.tensor.construct import memory_like
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout

__all__ = ["RANDOM_OPS", "random_program"]

aten = torch.ops.aten


def _like(fill_: Any, *fixed: Any) -> Callable[..., Tensor]:
    """A new tensor like another one, filled by an op."""

    def run(x: Tensor, *, generator: Any = None, **kwargs: Any) -> Tensor:
        return FILLS[fill_](memory_like(x, **kwargs), *fixed, generator=generator)

    return run


def _integers_like(x: Tensor, *bounds: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    low, high = (0, *bounds)[-2:]
    high = int(high)  # a tensor with one element, in one overload
    torch.randint(low, high, (1,), dtype=kwargs.get("dtype") or x.dtype, generator=UNUSED)  # for its errors
    out = memory_like(x, **kwargs)
    func = aten.randint_like.default
    return fill(func, out, Numbers(str(func), (low, high), integers), generator)


def _functional(fill_: Any) -> Callable[..., Tensor]:
    """The functional variant of a filling op."""

    def run(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        return FILLS[fill_](memory_like(x), *args, generator=generator, **kwargs)

    return run


def _bernoulli(x: Tensor, generator: Any = None) -> Tensor:
    return FILLS[aten.bernoulli_.Tensor](memory_like(x), x, generator=generator)


def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """Normal numbers whose mean or standard deviation, or both, are tensors."""
    if isinstance(std, Tensor):
        if std.is_complex():
            raise RuntimeError("normal expects standard deviation to be non-complex")
        check_all(aten.normal.float_Tensor, std >= 0, "normal expects all elements of std >= 0.0")
    elif std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    like = mean + std  # has the shape and layout of the result
    dtype = (mean if isinstance(mean, Tensor) else std).dtype
    out = FILLS[aten.normal_.default](memory_like(like, dtype=dtype), generator=generator)
    return out.mul_(std).add_(mean)


def _by_parameters(func: Any, distribution: Callable[..., Tensor]) -> Numbers:
    """Numbers from a distribution with parameters per element, in their dtype and on their device."""
    return Numbers(
        str(func),
        (),
        lambda draw, cells, dtype, device, *parameters, out=None: distribution(draw, cells, *parameters),
    )


def _poisson(rates: Tensor, generator: Any = None) -> Tensor:
    valid = (rates >= 0) & rates.isfinite()
    check_all(
        aten.poisson.default, valid, "invalid Poisson rate, expected rate to be non-negative and finite"
    )
    return fill(
        aten.poisson.default,
        memory_like(rates),
        _by_parameters(aten.poisson.default, poisson),
        generator,
        rates,
    )


def _binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    func = aten.binomial.default
    valid = (count >= 0) & count.isfinite() & (count == count.floor())
    check_all(func, valid, "binomial expects non-negative integer counts")
    check_all(func, (prob >= 0) & (prob <= 1), "binomial expects probabilities from 0 to 1")
    like = count + prob  # has the shape and layout of the result
    out = memory_like(like, dtype=count.dtype)
    return fill(func, out, _by_parameters(func, binomial), generator, count, prob)


def _gamma(alpha: Tensor, generator: Any = None) -> Tensor:
    func = aten._standard_gamma.default
    valid = (alpha > 0) & alpha.isfinite()
    check_all(func, valid, "_standard_gamma expects positive and finite concentrations")
    return fill(func, memory_like(alpha), _by_parameters(func, gamma), generator, alpha)


def _dirichlet(alpha: Tensor, generator: Any = None) -> Tensor:
    sample = _gamma(alpha, generator)
    return sample / sample.sum(-1, keepdim=True)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    mask = FILLS[aten.bernoulli_.float](memory_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _fused_dropout(x: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    """`p` is the probability to keep an element, and the mask has dtype uint8."""
    mask = FILLS[aten.bernoulli_.float](memory_like(x, dtype=torch.uint8), p, generator=generator)
    return x * mask * (1 / p), mask


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
    slopes = FILLS[aten.uniform_.default](memory_like(x), lower, upper, generator=generator)
    slopes = torch.where(x <= 0, slopes, 1)
    if into is not None:
        into.copy_(slopes)
    return (x * slopes).contiguous(), slopes  # as the kernel's, whatever the strides of the input are


def _multinomial(
    probs: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Categories drawn by their weights. Rows may be split, but the categories of a row are gathered."""
    _check_weights(probs, num_samples, replacement)
    if isinstance(probs, DTensor):
        layout = probs._spec.layout
        dims = [*layout.dims[:-1], Layout.replicated(probs.shape, layout.axes).dims[-1]]
        probs = to_layout(aten.multinomial.default, probs, layout.with_partial({}).with_dims(dims))
    weights = probs.double()
    if not replacement:
        # exponential race: the smallest times, with the weights as rates, win
        times = FILLS[aten.exponential_.default](memory_like(weights), generator=generator)
        return (weights / times).topk(num_samples, -1).indices
    sums = weights.cumsum(-1)
    total = sums[..., -1:]
    u = _uniform_rows(weights, num_samples, generator)
    found = torch.searchsorted(sums, u * total, right=True)
    number = torch.ones_like(weights, dtype=torch.int64).cumsum(-1) - 1
    last = ((weights > 0) * number).amax(-1, keepdim=True)
    return torch.minimum(found, last)  # rounding must not select a category past the last with a weight


def _uniform_rows(x: Tensor, count: int, generator: Any) -> Tensor:
    """`count` uniform numbers per row of a tensor, in its layout except for the last dim."""
    out = memory_like(x[..., :1].expand(*x.shape[:-1], count), memory_format=torch.contiguous_format)
    return FILLS[aten.uniform_.default](out, generator=generator)


def _check_weights(probs: Tensor, count: int, replacement: bool) -> None:
    """Raise as torch does, on all ranks alike."""
    func = aten.multinomial.default
    # torch checks dims, dtype and counts, on one row of ones
    valid = probs.dim() in (1, 2) and probs.is_floating_point()
    row = (probs.shape[-1],) if valid else (1,) * probs.dim()
    torch.multinomial(torch.ones(row, dtype=probs.dtype), count, replacement, generator=UNUSED)
    if probs.numel() == 0 or is_off_mesh(probs):
        return
    check_all(
        func,
        (probs >= 0) & probs.isfinite(),
        "probability tensor contains either `inf`, `nan` or element < 0",
    )
    fewest = value_of(func, (probs > 0).sum(-1).min())
    if fewest < 1:
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement and fewest < count:
        raise RuntimeError(
            "invalid multinomial distribution (with replacement=False, not enough non-negative category to sample)"
        )


RANDOM_OPS: dict[Any, Callable[..., Any]] = {
    **FILLS,
    **{getattr(aten.rand_like, o): _like(aten.uniform_.default) for o in ("default", "generator")},
    **{getattr(aten.randn_like, o): _like(aten.normal_.default) for o in ("default", "generator")},
    **{
        getattr(aten.randint_like, o): _integers_like
        for o in ("default", "generator", "Tensor", "Tensor_generator", "low_dtype", "low_generator_dtype")
    },
    **{
        getattr(aten, name).default: _functional(getattr(aten, name + "_").default)
        for name in ("uniform", "exponential", "cauchy", "log_normal", "geometric")
    },
    aten.normal_functional.default: _functional(aten.normal_.default),
    aten.random.default: _functional(aten.random_.default),
    aten.random.to: _functional(aten.random_.to),
    getattr(aten.random, "from"): _functional(getattr(aten.random_, "from")),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _functional(aten.bernoulli_.float),
    aten.bernoulli.Tensor: _functional(aten.bernoulli_.Tensor),
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
"""By op."""


@lru_cache(maxsize=512)
def random_program(func: Any) -> Callable[..., Any] | None:
    """The program of a random op, or None if it is not one of these."""
    program = RANDOM_OPS.get(func)
    if program is not None or not op_info(func).out_names:
        return program
    functional = op_info(func).functional
    return writing_variant(func, RANDOM_OPS[functional]) if functional in RANDOM_OPS else None
