"""Ops that change a tensor's own shape, such as `squeeze_`: the tensor becomes the result of the out-of-place op."""

from __future__ import annotations

from typing import Any

from shardwise.call.schema import op_info
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import without_dispatch

__all__ = ["run_inplace_view"]


def run_inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Replace the block and spec of the first argument by those of the out-of-place op's result."""
    x: DTensor = args[0]
    result = DTensor.__torch_dispatch__(op_info(func).out_of_place, (), args, kwargs)
    x._local_tensor, x._spec = result._local_tensor, result._spec
    with without_dispatch():
        func(*args, **kwargs)  # changes the sizes and strides of the wrapper
    return x
