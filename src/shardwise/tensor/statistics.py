"""Ops along a split dim by exchanging statistics: a maximum, a sum, a mean per row, instead of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.cost import DEFAULT_COSTS
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.offer import Maker, Offer
from shardwise.tensor.prepare import Prepared

__all__ = ["OFFERS"]


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    top = x.amax(dims, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)  # inf - inf is not a number
    out = (x - top).exp().sum(dims, keepdim=True).log() + top
    return out if keepdim else out.squeeze(dims)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    size = (x if dtype is None else x.to(dtype)).abs()
    dims = _dims(x, dim)
    if ord == math.inf:
        return size.amax(dims, keepdim=keepdim)
    if ord == -math.inf:
        return size.amin(dims, keepdim=keepdim)
    if ord == 0:
        return (size != 0).sum(dims, keepdim=keepdim).to(size.dtype)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        return (size * size).sum(dims, keepdim=keepdim).sqrt()
    return (size**ord).sum(dims, keepdim=keepdim) ** (1 / ord)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    spread = x - mean
    var = (spread * spread).sum(dims, keepdim=True) / max(
        count - (1 if correction is None else correction), 0
    )
    return (var, mean) if keepdim else (var.squeeze(dims), mean.squeeze(dims))


def _var(*args: Any, **kwargs: Any) -> Tensor:
    return _var_mean(*args, **kwargs)[0]


def _std(*args: Any, **kwargs: Any) -> Tensor:
    return _var(*args, **kwargs).sqrt()


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(*args, **kwargs)
    return var.sqrt(), mean


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    spread = x - mean
    rstd = ((spread * spread).mean(dims, keepdim=True) + eps).rsqrt()
    out = spread * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == [] or dim == ():
        return list(range(x.dim()))
    return [d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])]


# With how many exchanges each takes.
_OPS: dict[Any, tuple[int, Callable[..., Any]]] = {
    torch.ops.aten._softmax.default: (2, _softmax),
    torch.ops.aten._log_softmax.default: (2, _log_softmax),
    torch.ops.aten.logsumexp.default: (2, _logsumexp),
    torch.ops.aten.linalg_vector_norm.default: (1, _vector_norm),
    torch.ops.aten.var.correction: (2, _var),
    torch.ops.aten.std.correction: (2, _std),
    torch.ops.aten.var_mean.correction: (2, _var_mean),
    torch.ops.aten.std_mean.correction: (2, _std_mean),
    torch.ops.aten.native_layer_norm.default: (2, _layer_norm),
}


def _maker(count: int, run: Callable[..., Any]) -> Maker:
    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        x: DTensor = args[0]
        plan = None if recipe is None else recipe.moves[0]
        # in a narrow dtype the parts would be rounded before they are added
        wide = x.dtype in (torch.float32, torch.float64)
        if plan is None or not wide or x._spec.layout.partial or 0 in x.shape:
            return None
        over = [d for d, (a, b) in enumerate(zip(plan.source.dims, plan.target.dims, strict=True)) if a != b]
        sent = 2 * plan.itemsize * math.prod(x.shape) // math.prod(x.shape[d] for d in over)
        latency, width = DEFAULT_COSTS.pace(tuple(range(len(x._spec.layout.axes))))
        return Offer(count * (latency + sent / width), run)

    return make


OFFERS: dict[Any, Maker] = {op: _maker(count, run) for op, (count, run) in _OPS.items()}
