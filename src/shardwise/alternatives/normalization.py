"""Batch norm over a split batch and group norm over split groups, by their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose, in_float32, reduce_pending
from shardwise.alternatives.statistics import by_statistics, rows_gradient
from shardwise.call.meta import statistic_dtype
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.layout import LayoutError, view
from shardwise.layout.sizes import same_sizes
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES", "WITHOUT_RULE"]

aten = torch.ops.aten


def _per_channel(x: Tensor, values: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts with a tensor that has its channels in dim 1."""
    return values.view([1, -1, *[1] * (x.dim() - 2)])


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _per_channel(x, weight)
    return x if bias is None else x + _per_channel(x, bias)


def _rows(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch norm in training, with the statistics of the global batch."""
    func, dims = aten.native_batch_norm.default, _rows(x)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    count = math.prod(x.shape[d] for d in dims)
    mean = reduce_pending(func, wide.mean(dims))
    centered = wide - _per_channel(x, mean)
    squares = reduce_pending(func, (centered * centered).sum(dims))
    rstd = (squares / count + eps).rsqrt()
    for running, current in ((running_mean, mean), (running_var, squares / (count - 1))):
        if running is not None:
            running.copy_(running.to(current.dtype) * (1 - momentum) + current * momentum)
    out = _scale(centered * _per_channel(x, rstd), weight, bias)
    dtype = statistic_dtype((x, weight, bias, running_mean, running_var))
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _batch_norm_no_stats(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a batch norm in training; that of the input needs those of weight and bias reduced."""
    func, dims = aten.native_batch_norm_backward.default, _rows(x)
    count = math.prod(x.shape[d] for d in dims)
    normalized = (x - _per_channel(x, mean)) * _per_channel(x, rstd)
    of_bias = reduce_pending(func, grad.sum(dims))
    of_weight = reduce_pending(func, (grad * normalized).sum(dims))
    centered = grad - _per_channel(x, of_bias / count) - normalized * _per_channel(x, of_weight / count)
    each = (_scale(centered, rstd if weight is None else rstd * weight, None), of_weight, of_bias)
    return tuple(value if wanted else None for value, wanted in zip(each, output_mask, strict=True))


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm with one row per group."""
    size = c // group * hw
    rows = x.reshape(n, group, size)
    out, mean, rstd = aten.native_layer_norm.default(rows, [size], None, None, eps)
    return _scale(out.reshape(x.shape), weight, bias), mean.reshape(n, group), rstd.reshape(n, group)


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    size = c // group * hw
    rows, rstd = x.reshape(n, group, size), rstd.unsqueeze(-1)
    normalized = (rows - mean.unsqueeze(-1)) * rstd
    out: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        scaled = _scale(grad, weight, None).reshape(n, group, size)
        out[0] = rows_gradient(scaled, normalized, rstd, [-1]).reshape(x.shape)
    if output_mask[1]:
        out[1] = (grad * normalized.reshape(x.shape)).sum(_rows(x))
    if output_mask[2]:
        out[2] = grad.sum(_rows(x))
    return tuple(out)


def _propose_group_norm(
    program: Callable[..., Any], call: OpCall, resolution: Resolution
) -> Alternative | None:
    """Propose a program for tensors whose layout has a view with one row per group."""
    x = call.named["input"]
    if not isinstance(x, DTensor) or 0 in x.shape or x.dim() < 2:
        return None
    layout = x._spec.layout
    same_shape = [t for t in call.args if isinstance(t, DTensor) and same_sizes(t.shape, x.shape)]
    if any(t._spec.layout is not layout for t in same_shape) or layout.partial:
        return None
    n, c, hw, group = (call.named[name] for name in ("N", "C", "HxW", "group"))
    try:
        view(layout, (n, group, c // group * hw))
    except LayoutError:  # no view without communication
        return None
    return Alternative(in_float32(program, resolution))


def _propose_batch_norm(
    program: Callable[..., Any], call: OpCall, resolution: Resolution | None
) -> Alternative | None:
    """Propose a program for batch norm in training; no rule covers one that updates running statistics."""
    x = call.named["input"]
    if not isinstance(x, DTensor) or not call.named["training"] or x.dim() < 2 or 0 in x.shape:
        return None
    return None if x._spec.layout.partial or not x.dtype.is_floating_point else Alternative(program)


def _propose_batch_norm_backward(call: OpCall, resolution: Resolution) -> Alternative | None:
    return by_statistics(_batch_norm_backward, call, resolution) if call.named["train"] else None


WITHOUT_RULE = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)

ALTERNATIVES: dict[Any, Propose] = {
    aten.native_batch_norm.default: partial(_propose_batch_norm, _batch_norm),
    aten._native_batch_norm_legit.default: partial(_propose_batch_norm, _batch_norm),
    aten._native_batch_norm_legit.no_stats: partial(_propose_batch_norm, _batch_norm_no_stats),
    aten.native_batch_norm_backward.default: _propose_batch_norm_backward,
    aten.native_group_norm.default: partial(_propose_group_norm, _group_norm),
    aten.native_group_norm_backward.default: partial(_propose_group_norm, _group_norm_backward),
}
