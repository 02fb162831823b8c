"""For each op that rearranges dims, what the dims of its result are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._ops.dim_specs import (
    Broadcast,
    DimSpec,
    Flatten,
    InputDim,
    Repeat,
    Singleton,
    Split,
    infer_size,
    view_groups,
)
from shardwise._ops.utils import normalize_dim, normalize_dims

__all__ = ["dim_maps"]

DimMap = tuple[DimSpec, ...]


def _sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes that were passed one by one, or as one sequence."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)


def _input_dims(ndim: int) -> DimMap:
    return tuple(InputDim(d) for d in range(ndim))


def _pad_left(ndim: int, least: int) -> DimMap:
    return (Singleton(),) * max(0, least - ndim) + _input_dims(ndim)


def _atleast_3d(x: Tensor) -> DimMap:
    match _input_dims(x.ndim):
        case ():
            return (Singleton(),) * 3
        case (only,):
            return (Singleton(), only, Singleton())
        case (first, second):
            return (first, second, Singleton())
        case dims:
            return dims


def _expand(x: Tensor, *sizes: Any) -> DimMap:
    after = _sizes(sizes)
    before = (1,) * (len(after) - x.ndim) + tuple(x.shape)
    dims = _pad_left(x.ndim, len(after))

    def expand(dim: DimSpec, size: int, wanted: int) -> DimSpec:
        assert wanted == -1 or size in (1, wanted), f"a dim of size {size} cannot be expanded to {wanted}"
        return dim if wanted in (-1, size) else Broadcast(dim, wanted)

    return tuple(map(expand, dims, before, after))


def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> DimMap:
    if x.ndim == 0:
        return (Singleton(),)
    start, end = normalize_dims((start_dim, end_dim), x.ndim)
    dims = _input_dims(x.ndim)
    return (*dims[:start], Flatten.new(dims[start : end + 1]), *dims[end + 1 :])


def _movedim(x: Tensor, source: Any, destination: Any) -> DimMap:
    order = torch.movedim(
        torch.empty([0] * x.ndim, device="meta").as_strided([1] * x.ndim, [*range(x.ndim)]),
        source,
        destination,
    )
    return tuple(InputDim(d) for d in order.stride())


def _permute(x: Tensor, *dims: Any) -> DimMap:
    return tuple(InputDim(d) for d in normalize_dims(_sizes(dims), x.ndim))


def _repeat(x: Tensor, *sizes: Any) -> DimMap:
    times = _sizes(sizes)
    return tuple(map(Repeat.new, _pad_left(x.ndim, len(times)), times))


def _tile(x: Tensor, *dims: Any) -> DimMap:
    times = _sizes(dims)
    return _repeat(x, (1,) * (x.ndim - len(times)) + times)


def _view(x: Tensor, *sizes: Any) -> DimMap:
    return view_groups(x.shape, infer_size(math.prod(x.shape), _sizes(sizes)))


def _squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> DimMap:
    among = range(x.ndim) if dim is None else normalize_dims(dim, x.ndim)
    return tuple(InputDim(d) for d, size in enumerate(x.shape) if size != 1 or d not in among)


def _transpose(x: Tensor, dim0: int, dim1: int) -> DimMap:
    dims = list(_input_dims(x.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return tuple(dims)


def _unsqueeze(x: Tensor, dim: int) -> DimMap:
    dims = _input_dims(x.ndim)
    at = normalize_dim(dim, x.ndim + 1)
    return (*dims[:at], Singleton(), *dims[at:])


def _view_as_complex(x: Tensor) -> DimMap:
    *dims, last, parts = _input_dims(x.ndim)
    return (*dims, Flatten((last, parts)))


def _view_as_real(x: Tensor) -> DimMap:
    *dims, last = _input_dims(x.ndim)
    return (*dims, *(Split(last, (x.shape[-1], 2), i) for i in range(2)))


dim_maps: dict[Callable[..., Any], Callable[..., DimMap]] = {
    torch.atleast_1d: lambda x: _pad_left(x.ndim, 1),
    torch.atleast_2d: lambda x: _pad_left(x.ndim, 2),
    torch.atleast_3d: _atleast_3d,
    torch.broadcast_to: _expand,
    Tensor.expand: _expand,
    torch.flatten: _flatten,
    torch.movedim: _movedim,
    torch.permute: _permute,
    torch.ravel: _flatten,
    Tensor.repeat: _repeat,
    torch.reshape: _view,
    torch.squeeze: _squeeze,
    torch.tile: _tile,
    torch.transpose: _transpose,
    torch.unsqueeze: _unsqueeze,
    Tensor.view: _view,
    torch.view_as_complex: _view_as_complex,
    torch.view_as_real: _view_as_real,
}
"""By op, the function that takes the op's arguments and returns what each dim of its result is made of."""
