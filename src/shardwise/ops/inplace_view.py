"""Ops that change a tensor's own shape, such as `squeeze_`: the tensor becomes the result of the out-of-place op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.call.grown_memory import grown
from shardwise.call.schema import op_info
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import tracking_views, without_dispatch
from shardwise.torch_internals.subclass import bump_versions

__all__ = ["run_inplace_view"]

aten = torch.ops.aten
_COMPOSITE = frozenset({aten.swapdims_.default, aten.swapaxes_.default})


def run_inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Replace the block and spec of the first argument by those of the out-of-place op's result."""
    x: DTensor = args[0]
    if func is aten.set_.source_Tensor:
        if isinstance(args[1], DTensor):
            x._replace_data(args[1])
        else:
            x.data = args[1]  # raises
        return x
    shape = _new_size(func, args)
    if shape is not None and tuple(shape) == tuple(x.shape) and not kwargs.get("memory_format"):
        return x  # whatever its strides are
    with tracking_views():  # so that the result knows its base
        larger = grown(x, shape, kwargs.get("memory_format")) if shape else None
        if larger is not None:
            result: DTensor = larger
        elif func is aten.resize_.default and _fits(x, args[1]):
            result = x.view(-1)[: math.prod(args[1])].view(args[1])  # type: ignore[assignment]
        else:
            result = op_info(func).out_of_place(*args, **kwargs)
    if func in _COMPOSITE:  # inference mode passes it on whole, and so does not count the write
        bump_versions([x])
    x._adopt(result)
    with without_dispatch():
        func(*args, **kwargs)  # changes the sizes and strides of the wrapper
    return x


def _new_size(func: Any, args: tuple[Any, ...]) -> Sequence[int] | None:
    if func is aten.resize_as_.default:
        return args[1].shape  # type: ignore[no-any-return]
    return args[1] if func is aten.resize_.default else None


def _fits(x: DTensor, size: Sequence[int]) -> bool:
    """Whether a tensor has enough memory for another size."""
    return x.is_contiguous() and math.prod(size) <= x.numel()
