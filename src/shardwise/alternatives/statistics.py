"""Softmax, norms and variances along a split dim: communicate statistics of the rows instead of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose, in_float32, reduce_pending
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.layout.sizes import same_sizes
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES", "by_statistics", "rows_gradient"]

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    top = reduce_pending(aten._safe_softmax.default, x.amax(dim, keepdim=True))
    masked = top == -math.inf  # rows that are masked entirely become zeros
    e = (x - top.masked_fill(masked, 0)).exp()
    return (e / e.sum(dim, keepdim=True)).masked_fill(masked, 0)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    product = grad * out
    return product - out * product.sum(dim, keepdim=True)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return grad - out.exp() * grad.sum(dim, keepdim=True)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    top = reduce_pending(aten.logsumexp.default, x.amax(dims, keepdim=True))
    top = top.masked_fill(top.isinf(), 0)  # inf - inf is NaN
    out = (x - top).exp().sum(dims, keepdim=True).log() + top
    return out if keepdim else out.squeeze(dims)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    magnitude = (x if dtype is None else x.to(dtype)).abs()
    dims = _dims(x, dim)
    if ord == math.inf:
        return magnitude.amax(dims, keepdim=keepdim)
    if ord == -math.inf:
        return magnitude.amin(dims, keepdim=keepdim)
    if ord == 0:
        return (magnitude != 0).sum(dims, keepdim=keepdim, dtype=magnitude.dtype)
    if ord == 1:
        return magnitude.sum(dims, keepdim=keepdim)
    if ord == 2:
        return (magnitude * magnitude).sum(dims, keepdim=keepdim).sqrt()
    return (magnitude**ord).sum(dims, keepdim=keepdim) ** (1 / ord)


def _norm(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, **kwargs)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = reduce_pending(aten.var_mean.correction, x.mean(dims, keepdim=True))
    centered = x - mean
    lost = 1 if correction is None else correction
    divisor = max(
        count - (int(lost) if lost == int(lost) else lost), 0
    )  # whole, as a symbolic size is to stay one
    var = (centered * centered).sum(dims, keepdim=True) / divisor
    return (var, mean) if keepdim else (var.squeeze(dims), mean.squeeze(dims))


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(*args, **kwargs)
    return var.sqrt(), mean


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    mean = reduce_pending(aten.native_layer_norm.default, x.mean(dims, keepdim=True))
    centered = x - mean
    rstd = ((centered * centered).mean(dims, keepdim=True) + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


def rows_gradient(grad: Tensor, normalized: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """The gradient of rows along some dims, from that of the normalized rows."""
    centered = grad - grad.mean(dims, keepdim=True)
    return (centered - normalized * (grad * normalized).mean(dims, keepdim=True)) * rstd


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    lead = x.dim() - len(normalized_shape)
    dims, rows = list(range(lead, x.dim())), list(range(lead))
    normalized = (x - mean) * rstd
    out: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        out[0] = rows_gradient(grad if weight is None else grad * weight, normalized, rstd, dims)
    if output_mask[1]:
        out[1] = (grad * normalized).sum(rows) if rows else grad * normalized
    if output_mask[2]:
        out[2] = grad.sum(rows) if rows else grad.clone()
    return tuple(out)


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == [] or dim == ():
        return list(range(x.dim()))
    return [d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])]


_PROGRAMS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.var.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    aten.std.correction: lambda *args, **kwargs: _std_mean(*args, **kwargs)[0],
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}


def by_statistics(program: Callable[..., Any], call: OpCall, resolution: Resolution) -> Alternative | None:
    """Propose a program that communicates statistics, for a call whose rule would gather rows."""
    first = call.args[0]
    if not isinstance(first, DTensor) or not first.dtype.is_floating_point or 0 in first.shape:
        return None
    # other tensors of the same shape, such as a gradient, have the same rows
    rows = [t for t in call.args if isinstance(t, DTensor) and same_sizes(t.shape, first.shape)]
    target = resolution.moves[0].target if resolution.moves[0] is not None else first._spec.layout
    if any(t._spec.layout.partial for t in rows) or all(t._spec.layout is target for t in rows):
        return None
    return Alternative(in_float32(program, resolution))


ALTERNATIVES: dict[Any, Propose] = {op: partial(by_statistics, program) for op, program in _PROGRAMS.items()}
