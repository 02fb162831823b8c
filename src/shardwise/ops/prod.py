"""The gradient of a product as plain tensors have it.

torch divides the product by each factor if none is zero. For tensor subclasses it always multiplies the other factors
instead, which differs where a factor is NaN and takes two cumulative products along the split dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import gather
from shardwise.comm import first_rank
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.patches import KernelPatch, beneath_patches
from shardwise.torch_internals.tracing import is_tracing

__all__ = ["prod_patches"]

aten = torch.ops.aten


def prod_patches() -> list[KernelPatch]:
    """The patches of `prod`."""
    reason = "torch differentiates it by another formula for tensor subclasses"
    return [
        KernelPatch(aten.prod.default, _prod, reason, _needs_grad),
        KernelPatch(aten.prod.dim_int, _prod, reason, _needs_grad),
    ]


def _prod(
    x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not has_tangent(x):
        return _Prod.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]
    # torch's formula for forward-mode derivatives creates ones as a plain tensor
    with override_settings(plain="replicate"), beneath_patches():
        return _call(x, dim, keepdim, dtype)


def _call(x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Any:
    if dim is None:
        return aten.prod.default(x, dtype=dtype)
    return aten.prod.dim_int(x, dim, keepdim, dtype=dtype)


def _needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # tracing has no values to look for zeros in
    x = args[0]
    return isinstance(x, DTensor) and x.requires_grad and torch.is_grad_enabled() and not is_tracing()


class _Prod(torch.autograd.Function):
    """`apply(x, dim or None, keepdim, dtype or None)`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Any:
        ctx.dim, ctx.keepdim = dim, keepdim
        out = _call(x, dim, keepdim, dtype)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, out = ctx.saved_tensors
        x = x.to(grad.dtype)
        return _grad(grad, x, out, ctx.dim, ctx.keepdim), None, None, None


def _grad(grad: Any, x: Any, out: Any, dim: int | None, keepdim: bool) -> Any:
    if x.dim() == 0:
        return grad
    zeros = _zeros_in(x)
    if dim is not None and not keepdim:
        grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
    if zeros == 0:
        return grad * (out / x).conj()
    if dim is not None:
        return grad * _others(x, dim).conj()
    if zeros > 1 and not torch.is_grad_enabled():  # two zeros: each makes the derivative of the other zero
        return torch.zeros_like(x)
    return grad * _others(x.reshape(-1), 0).view(x.shape).conj()


def _zeros_in(x: Any) -> int:
    count = (x.detach() == 0).sum()
    if isinstance(count, DTensor):
        count = first_rank(gather(aten.prod.default, count))
    return int(count.item()) if count.numel() else 0  # a rank that is not on the mesh has no elements


def _others(x: Tensor, dim: int) -> Tensor:
    """For each element the product of all others along a dim: of those before it, times those after it."""
    n = x.shape[dim]
    one = torch.ones_like(x.narrow(dim, 0, 1), memory_format=torch.contiguous_format)
    before = torch.cat([one, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after
