"""Strides of the results of ops on the CPU, where torch's meta kernels give others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors
from shardwise.call.fft_strides import FFT_KERNELS
from shardwise.call.memory_formats import is_channels_last

__all__ = ["CPU_KERNELS"]

aten = torch.ops.aten


def _ordered(func: Any, order: Callable[[Tensor, Tensor], Tensor], second: int = 1) -> Callable[..., Tensor]:
    """The output of an op of two tensors, with the strides of the elementwise op `order` of them."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = func(*args, **kwargs)
        return out.new_empty_strided(out.shape, order(args[0], args[second]).stride())

    return kernel


def _contiguous(func: Any) -> Callable[..., Any]:
    """The outputs of an op, contiguous."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(lambda t: t.new_empty(t.shape), func(*args, **kwargs))

    return kernel


def _column_major(func: Any) -> Callable[..., Any]:
    """The outputs of a factorization, the last of which has column-major matrices."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        *rest, last = func(*args, **kwargs)
        return [*rest, last.mT.contiguous().mT]

    return kernel


def _by_pixels(func: Any) -> Callable[..., Any]:
    """The output of an op, channels last exactly if the input is."""

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out: Tensor = func(x, *args, **kwargs)
        last = x.dim() == 4 and is_channels_last(x.shape, x.stride())
        return out.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    return kernel


def _batch_norm_backward(grad: Tensor, x: Tensor, *args: Any) -> Any:
    """The gradients of a batch norm, that of the input in its memory format."""
    first, *rest = aten.native_batch_norm_backward.default(grad, x, *args)
    last = x.dim() == 4 and is_channels_last(x.shape, x.stride())
    form = torch.channels_last if last else torch.contiguous_format
    return [first.contiguous(memory_format=form), *rest]


CPU_KERNELS: dict[Any, Callable[..., Any]] = {
    **FFT_KERNELS,
    **{
        func: _ordered(func, torch.mul, second)
        for func, second in (
            (aten.hardtanh_backward.default, 1),
            (aten.softplus_backward.default, 1),
            (aten.native_dropout_backward.default, 1),
            (aten.elu_backward.default, 5),
            (aten.gelu_backward.default, 1),
            (aten.sigmoid_backward.default, 1),
            (aten.tanh_backward.default, 1),
        )
    },
    **{
        func: _ordered(func, lambda grad, x: torch.mul(x, grad))
        for func in (aten.leaky_relu_backward.default, aten.threshold_backward.default)
    },
    **{
        func: _contiguous(func)
        for func in (
            aten._log_softmax_backward_data.default,
            aten.native_layer_norm_backward.default,
            aten.nonzero_static.default,
        )
    },
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    **{func: _column_major(func) for func in (aten._linalg_svd.default, aten.linalg_eig.default)},
    **{func: _by_pixels(func) for func in (aten.max_unpool2d.default, aten.channel_shuffle.default)},
    **{
        func: lambda x, *args, **kwargs: x.clone()
        for func in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
    },
}
"""Meta kernels with the strides that kernels for the CPU give."""
