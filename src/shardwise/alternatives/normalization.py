"""Batch and group norm over what is split, and group norm where groups are: by views and by exchanging statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, exchange_seconds, in_float32, settled
from shardwise.alternatives.statistics import exchanging
from shardwise.call.meta import statistic_dtype
from shardwise.call.resolve import Prepared
from shardwise.layout import LayoutError, view
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten


def _along_channels(x: Tensor, values: Tensor | None) -> Tensor | None:
    """One value per channel in the shape that meets a tensor with its channels in dim 1."""
    return None if values is None else values.view([1, -1, *[1] * (x.dim() - 2)])


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    by, plus = _along_channels(x, weight), _along_channels(x, bias)
    x = x if by is None else x * by
    return x if plus is None else x + plus


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
    """A batch norm in training, with the statistics of the global batch, the running ones too."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    dims, count = _rows(x), math.prod(x.shape[d] for d in _rows(x))
    mean = settled(aten.native_batch_norm.default, wide.mean(dims))
    spread = wide - mean.view([1, -1, *[1] * (x.dim() - 2)])
    squares = settled(aten.native_batch_norm.default, (spread * spread).sum(dims))
    rstd = (squares / count + eps).rsqrt()
    for running, now in ((running_mean, mean), (running_var, squares / (count - 1))):
        if running is not None:
            running.copy_(running.to(now.dtype) * (1 - momentum) + now * momentum)
    out = _scaled(spread * rstd.view([1, -1, *[1] * (x.dim() - 2)]), weight, bias)
    dtype = statistic_dtype((x, weight, bias, running_mean, running_var))
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _batch_norm_without(
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
    """The gradient of a batch norm in training; those of weights come with it, settled."""
    func, dims = aten.native_batch_norm_backward.default, _rows(x)
    count = math.prod(x.shape[d] for d in dims)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    seen = (x - mean.view(shape)) * rstd.view(shape)
    to_bias = settled(func, grad.sum(dims))
    to_weight = settled(func, (grad * seen).sum(dims))
    about = grad - (to_bias / count).view(shape) - seen * (to_weight / count).view(shape)
    each = (_scaled(about, rstd if weight is None else rstd * weight, None), to_weight, to_bias)
    return tuple(value if wanted else None for value, wanted in zip(each, output_mask, strict=True))


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A group norm is a layer norm of each group, seen as a row."""
    size = c // group * hw
    rows = x.reshape(n, group, size)
    out, mean, rstd = aten.native_layer_norm.default(rows, [size], None, None, eps)
    return _scaled(out.reshape(x.shape), weight, bias), mean.reshape(n, group), rstd.reshape(n, group)


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
    seen = (rows - mean.unsqueeze(-1)) * rstd
    down = _scaled(grad, weight, None).reshape(n, group, size)
    out: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        about = down - down.mean(-1, keepdim=True)
        about = (about - seen * (down * seen).mean(-1, keepdim=True)) * rstd
        out[0] = about.reshape(x.shape)
    if output_mask[1]:
        out[1] = (grad * seen.reshape(x.shape)).sum(_rows(x))
    if output_mask[2]:
        out[2] = grad.sum(_rows(x))
    return tuple(out)


def _grouped(run: Callable[..., Any], sizes_at: int) -> Maker:
    """Offers where each tensor can be seen as rows of groups: free if groups are whole, else with an exchange."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        x: DTensor = args[1] if sizes_at == 5 else args[0]
        n, c, hw, group = args[sizes_at : sizes_at + 4]
        large = [t for t in args if isinstance(t, DTensor) and t.shape == x.shape]
        if recipe is None or 0 in x.shape or x.dim() < 2:
            return None
        if any(t._spec.layout is not x._spec.layout for t in large) or x._spec.layout.partial:
            return None
        try:
            rows = view(x._spec.layout, (n, group, c // group * hw))
        except LayoutError:  # a group is cut in a way that rows are not
            return None
        is_split = any(f.axes for f in rows.dims[2])
        itemsize = max(x.dtype.itemsize, 4)
        seconds = exchange_seconds(rows, 2, n * group, itemsize) if is_split else 0.0
        return Offer(seconds, in_float32(run, recipe))

    return make


def _trained(run: Callable[..., Any], training_at: int) -> Maker:
    """Offers of a batch norm in training; there is no row for one that writes running statistics."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        x = args[0]
        if kwargs or not isinstance(x, DTensor) or not args[training_at] or x.dim() < 2 or 0 in x.shape:
            return None
        if x._spec.layout.partial or not x.dtype.is_floating_point:
            return None
        return Offer(exchange_seconds(x._spec.layout, 2, x.shape[1], 4), run)

    return make


def _trained_backward(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
    return exchanging(2, _batch_norm_backward)(args, kwargs, recipe) if args[7] else None


OFFERS: dict[Any, Maker] = {
    aten.native_batch_norm.default: _trained(_batch_norm, 5),
    aten._native_batch_norm_legit.default: _trained(_batch_norm, 5),
    aten._native_batch_norm_legit.no_stats: _trained(_batch_norm_without, 3),
    aten.native_batch_norm_backward.default: _trained_backward,
    aten.native_group_norm.default: _grouped(_group_norm, 3),
    aten.native_group_norm_backward.default: _grouped(_group_norm_backward, 5),
}
