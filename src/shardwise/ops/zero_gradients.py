"""Gradients that are zeros, which torch creates as plain tensors: of random numbers, and of signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.patches import KernelPatch, beneath_patches

__all__ = ["zero_gradient_patches"]

aten = torch.ops.aten


def zero_gradient_patches() -> list[KernelPatch]:
    """The patches of these ops."""
    reason = "torch creates the gradients of the mean and the standard deviation as plain tensors"
    funcs = (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
    sign = "torch creates the gradient of a sign, which is the second derivative of `abs`, as a plain tensor"
    return [
        *(KernelPatch(func, _normal(func), reason, _needs_grad) for func in funcs),
        KernelPatch(aten.sgn.default, _sign, sign, _needs_real_grad),
    ]


def _needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    has_dtensor = any(isinstance(t, DTensor) for t in tensors)
    return has_dtensor and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _needs_real_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = args[0]
    return not x.is_complex() and (_needs_grad(args, kwargs) or (isinstance(x, DTensor) and has_tangent(x)))


def _sign(x: Tensor) -> Any:
    if not has_tangent(x):
        return _Sign.apply(x)  # type: ignore[no-untyped-call]
    with override_settings(plain="replicate"), beneath_patches():  # the tangent is a plain tensor, too
        return aten.sgn.default(x)


def _normal(func: Any) -> Any:
    def run(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
        return _Normal.apply(func, mean, std, generator)  # type: ignore[no-untyped-call]

    return run


class _Normal(torch.autograd.Function):
    """`apply(op, mean, std, generator)`."""

    @staticmethod
    def forward(ctx: Any, func: Any, mean: Any, std: Any, generator: Any) -> Any:
        ctx.shapes = [t.shape if isinstance(t, Tensor) else None for t in (mean, std)]
        with beneath_patches():
            return func(mean, std, generator=generator)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = torch.zeros_like(grads[0])
        return None, *[None if shape is None else zeros.sum_to_size(shape) for shape in ctx.shapes], None


class _Sign(torch.autograd.Function):
    """`apply(x)` of real numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with beneath_patches():
            return aten.sgn.default(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.zeros_like(grads[0], memory_format=torch.contiguous_format)
