"""Strides of the results of Fourier transforms on the CPU.

torch's meta kernels give those of CUDA kernels, which run other programs of one-dimensional transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FFT_KERNELS"]

aten = torch.ops.aten


def _batch_dims(ndim: int, dims: Sequence[int]) -> list[int]:
    """The dims that are not transformed, in the order that C++'s `partition` leaves them in, which matters for equal strides.

    >>> _batch_dims(4, [1]), _batch_dims(4, [0])
    ([0, 3, 2], [3, 1, 2])
    """
    order, low, high = list(range(ndim)), 0, ndim
    while True:
        while low < high and order[low] not in dims:
            low += 1
        high -= 1
        while low < high and order[high] in dims:
            high -= 1
        if low >= high:
            return order[:low]
        order[low], order[high] = order[high], order[low]
        low += 1


def _transformed(x: Tensor, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The result of a transform: the other dims outermost in the order of their strides, then `dims` as they are given."""
    batch = sorted(_batch_dims(x.dim(), dims), key=lambda d: -x.stride()[d])
    order = [*batch, *dims]
    out = torch.empty([sizes[d] for d in order], dtype=dtype, device=x.device)
    return out.permute(sorted(range(x.dim()), key=order.__getitem__))


def _by_stride(x: Tensor, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=lambda d: -x.stride()[d])


def _r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    out: Tensor = aten._fft_r2c.default(x, dim, normalization, onesided)
    if not torch.backends.mkl.is_available():
        return out.new_empty(out.shape)
    dim = [d % x.dim() for d in dim]
    return _transformed(x, out.shape, [*_by_stride(x, dim[:-1]), dim[-1]], out.dtype)


def _c2c(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    out: Tensor = aten._fft_c2c.default(x, dim, normalization, forward)
    if not dim:
        return out  # a clone
    if not torch.backends.mkl.is_available():
        return out.new_empty(out.shape)
    return _transformed(x, out.shape, _by_stride(x, [d % x.dim() for d in dim]), out.dtype)


def _c2r(x: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    out: Tensor = aten._fft_c2r.default(x, dim, normalization, last_dim_size)
    if not torch.backends.mkl.is_available():
        return out.new_empty(out.shape)
    if len(dim) > 1:
        x = _c2c(x, dim[:-1], normalization, False)
    return _transformed(x, out.shape, [dim[-1] % x.dim()], out.dtype)


FFT_KERNELS: dict[Any, Any] = {
    aten._fft_r2c.default: _r2c,
    aten._fft_c2c.default: _c2c,
    aten._fft_c2r.default: _c2r,
}
"""Meta kernels of transforms, with the strides that kernels for the CPU give."""
