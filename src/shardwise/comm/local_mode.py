"""torch's `LocalTensorMode`: a simulation in which programs hold LocalTensors; inside of us they are PerRank tensors.

Both are one tensor per rank. A LocalTensor has one autograd graph for all ranks; each tensor in a PerRank has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from shardwise.comm.per_rank import PerRank
from shardwise.torch_internals.autograd_function import applied_directly
from shardwise.torch_internals.local_tensor import (
    LocalTensor,
    is_active,
    local_modes,
    local_tensor,
    tensors_of,
    without_local_mode,
)

__all__ = ["from_per_rank", "in_local_mode", "outside_local_mode", "to_per_rank"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_local_mode(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of ours that programs call: inside a LocalTensorMode it takes and returns LocalTensors."""

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not local_modes or not is_active():
            return fn(*args, **kwargs)
        with without_local_mode():
            return from_per_rank(fn(*to_per_rank(args), **to_per_rank(kwargs)))  # type: ignore[no-any-return]

    return call


def outside_local_mode(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of ours that torch calls, such as a backward pass, in which a LocalTensorMode changes nothing."""

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not local_modes:
            return fn(*args, **kwargs)
        with without_local_mode():
            return fn(*args, **kwargs)

    return call


def to_per_rank(value: Any) -> Any:
    """A value with each LocalTensor in it as a PerRank; differentiable."""
    return _mapped(value, LocalTensor, _split)


def from_per_rank(value: Any) -> Any:
    """A value with each PerRank in it as a LocalTensor; differentiable."""
    return _mapped(value, PerRank, _join)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        inner = [_mapped(v, kind, change) for v in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, dict):
        return {k: _mapped(v, kind, change) for k, v in value.items()}
    return value


def _split(x: Any) -> PerRank:
    ranks = tuple(tensors_of(x))
    if x.requires_grad and torch.is_grad_enabled():
        return PerRank(dict(zip(ranks, _Split.apply(x, ranks), strict=True)))  # type: ignore[no-untyped-call]
    out = PerRank(tensors_of(x))
    out._joined = x
    return out


def _join(x: PerRank) -> Tensor:
    if x._joined is not None:
        return x._joined
    if any(b.requires_grad for b in x.ranks):
        if torch.is_grad_enabled():
            return _Join.apply(tuple(x._blocks), *x.ranks)  # type: ignore[no-untyped-call, no-any-return]
        return local_tensor({r: b.detach() for r, b in x._blocks.items()})
    x._joined = local_tensor(x._blocks)  # one for each, as a block is one object
    return x._joined


@applied_directly
class _Split(torch.autograd.Function):
    """`apply(x, ranks)`: the tensor of each rank of a LocalTensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        return tuple(tensors_of(x)[r].detach() for r in ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Join.apply(ctx.ranks, *grads), None  # type: ignore[no-untyped-call]


@applied_directly
class _Join(torch.autograd.Function):
    """`apply(ranks, *tensors)`: the LocalTensor of one tensor per rank."""

    @staticmethod
    def forward(ctx: Any, ranks: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.ranks = ranks
        out = local_tensor({r: t.detach() for r, t in zip(ranks, tensors, strict=True)})
        return out.view_as(
            out
        )  # autograd refuses writes to a view that a function returns: others have this memory too

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if not isinstance(grad, LocalTensor):  # the same on all ranks
            return None, *[grad] * len(ctx.ranks)
        return None, *_Split.apply(grad, ctx.ranks)  # type: ignore[no-untyped-call]
