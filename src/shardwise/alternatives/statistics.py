"""Ops along a split dim by exchanging statistics: a maximum, a sum, a mean per row, instead of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, exchange_seconds, in_float32, seconds_of, settled
from shardwise.call.resolve import Prepared
from shardwise.plan import plan_redistribute
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS", "exchanging"]

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    top = settled(aten._safe_softmax.default, x.amax(dim, keepdim=True))
    nothing = top == -math.inf  # a row in which all is masked gives zeros
    e = (x - top.masked_fill(nothing, 0)).exp()
    return (e / e.sum(dim, keepdim=True)).masked_fill(nothing, 0)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    part = grad * out
    return part - out * part.sum(dim, keepdim=True)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return grad - out.exp() * grad.sum(dim, keepdim=True)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    top = settled(aten.logsumexp.default, x.amax(dims, keepdim=True))
    top = top.masked_fill(top.isinf(), 0)  # inf - inf is not a number
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


def _norm(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, **kwargs)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = settled(aten.var_mean.correction, x.mean(dims, keepdim=True))
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
    mean = settled(aten.native_layer_norm.default, x.mean(dims, keepdim=True))
    spread = x - mean
    rstd = ((spread * spread).mean(dims, keepdim=True) + eps).rsqrt()
    out = spread * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


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
    seen = (x - mean) * rstd
    down = grad if weight is None else grad * weight
    out: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        about = down - down.mean(dims, keepdim=True)
        out[0] = (about - seen * (down * seen).mean(dims, keepdim=True)) * rstd
    if output_mask[1]:
        out[1] = (grad * seen).sum(rows) if rows else grad * seen
    if output_mask[2]:
        out[2] = grad.sum(rows) if rows else grad.clone()
    return tuple(out)


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == [] or dim == ():
        return list(range(x.dim()))
    return [d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])]


# With how many exchanges each takes.
_OPS: dict[Any, tuple[int, Callable[..., Any]]] = {
    aten._softmax.default: (2, _softmax),
    aten._safe_softmax.default: (2, _safe_softmax),
    aten._log_softmax.default: (2, _log_softmax),
    aten._softmax_backward_data.default: (1, _softmax_backward),
    aten._log_softmax_backward_data.default: (1, _log_softmax_backward),
    aten.logsumexp.default: (2, _logsumexp),
    aten.linalg_vector_norm.default: (1, _vector_norm),
    aten.norm.Scalar: (1, _norm),
    aten.norm.ScalarOpt_dim: (1, _norm),
    aten.norm.ScalarOpt_dtype: (1, _norm),
    aten.norm.ScalarOpt_dim_dtype: (1, _norm),
    aten.var.correction: (2, _var),
    aten.std.correction: (2, _std),
    aten.var_mean.correction: (2, _var_mean),
    aten.std_mean.correction: (2, _std_mean),
    aten.native_layer_norm.default: (2, _layer_norm),
    aten.native_layer_norm_backward.default: (2, _layer_norm_backward),
}


def exchanging(count: int, run: Callable[..., Any]) -> Maker:
    """Offers of a program that exchanges `count` statistics per row of a tensor whose rows are split."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        first: DTensor = args[0]
        # tensors of the first one's shape, such as a gradient and what it is of, meet in the layout of one of them
        large = [t for t in args if isinstance(t, DTensor) and t.shape == first.shape]
        if recipe is None or not first.dtype.is_floating_point or 0 in first.shape:
            return None
        if any(t._spec.layout.partial for t in large):
            return None
        goal = recipe.moves[0].target if recipe.moves[0] is not None else first._spec.layout
        split = next((t for t in large if t._spec.layout is not goal), None)
        if split is None:
            return None
        lie = split._spec.layout
        meet = seconds_of([plan_redistribute(t._spec.layout, lie, t.dtype.itemsize) for t in large])
        over = [d for d, (a, b) in enumerate(zip(lie.dims, goal.dims, strict=True)) if a != b]
        rows = math.prod(first.shape) // math.prod(first.shape[d] for d in over)
        itemsize = max(first.dtype.itemsize, 4)
        return Offer(meet + exchange_seconds(lie, count, rows, itemsize), in_float32(run, recipe))

    return make


OFFERS: dict[Any, Maker] = {op: exchanging(count, run) for op, (count, run) in _OPS.items()}
