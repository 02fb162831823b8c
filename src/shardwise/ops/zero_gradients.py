"""Gradients that are zeros, which torch creates as plain tensors: of random numbers, of signs, of empty parts of `cat`."""

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
        KernelPatch(
            aten.cat.default,
            _cat,
            "torch creates the gradient of an empty vector as a plain tensor",
            _has_empty,
        ),
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


def _has_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether vectors are joined, of which an empty one gets a gradient."""
    tensors = args[0]
    if not any(t.dim() == 1 and t.requires_grad and not t.numel() for t in tensors):
        return False
    return torch.is_grad_enabled() and any(isinstance(t, DTensor) and t.dim() == 1 for t in tensors)


def _cat(tensors: Any, dim: int = 0) -> Tensor:
    with beneath_patches():
        if any(t.dim() != 1 for t in tensors):  # torch skips empty vectors beside tensors of several dims
            return torch.cat([t for t in tensors if t.dim() != 1 or t.numel()], dim)
        parts = [t if t.numel() else _Empty.apply(t) for t in tensors]  # type: ignore[no-untyped-call]
        return torch.cat([t.unsqueeze(1) for t in parts]).squeeze(1)


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
        ctx.save_for_backward(x)
        with beneath_patches():
            return aten.sgn.default(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors  # raises if it was written to, as torch's own node does
        return torch.zeros_like(grads[0], memory_format=torch.contiguous_format)


class _Empty(torch.autograd.Function):
    """`apply(x)` of a tensor without elements, whose gradient has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.zeros_like(grads[0])
