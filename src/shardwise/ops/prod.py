"""The gradient of a product as plain tensors have it.

torch divides the product by each factor where none is zero, but for subclasses of tensors it always multiplies the
others, which differs where a factor is NaN, and needs the factors in order: two cumulative products along what is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.override import instead_of

__all__ = ["divide_products"]

aten = torch.ops.aten


def divide_products() -> None:
    """Put our way before torch's where a DTensor wants a gradient."""
    instead_of(aten.prod.default, _of_all, _wants_grad)
    instead_of(aten.prod.dim_int, _along, _wants_grad)


def _of_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _Prod.apply(x, None, False, dtype)  # type: ignore[no-untyped-call]


def _along(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _Prod.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


def _wants_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # what is traced has no values to look for zeros in
    x = args[0]
    return bool(x.requires_grad) and torch.is_grad_enabled() and not _is_traced() and not _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    """Whether a derivative comes along with the values: torch's own product has a formula for that."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _is_traced() -> bool:
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or torch.compiler.is_compiling()


class _Prod(torch.autograd.Function):
    """`apply(x, dim or None, keepdim, dtype or None)`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Any:
        ctx.dim, ctx.keepdim = dim, keepdim
        given = (x,) if dim is None else (x, dim, keepdim)
        out = (aten.prod.default if dim is None else aten.prod.dim_int)(*given, dtype=dtype)
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
    if zeros > 1 and not torch.is_grad_enabled():  # of two zeros, each makes the other's derivative zero
        return torch.zeros_like(x)
    return grad * _others(x.reshape(-1), 0).view(x.shape).conj()


def _zeros_in(x: Any) -> int:
    count = (x.detach() == 0).sum().full_tensor()
    return int(count.item()) if count.numel() else 0  # nothing is there on a rank that is not on the mesh


def _others(x: Tensor, dim: int) -> Tensor:
    """The product of all other elements along a dim, for each: of those before it and of those behind."""
    n = x.shape[dim]
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    behind = torch.cat([one, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * behind
