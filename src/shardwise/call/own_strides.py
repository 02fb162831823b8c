"""Strides of results that the op itself did not compute: of programs of other ops, and of ops on gathered tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.op_call import OpCall
from shardwise.call.route import Run
from shardwise.comm import map_ranks
from shardwise.tensor.dtensor import DTensor

__all__ = ["with_own_strides"]


def with_own_strides(call: OpCall, inner: Run) -> Run:
    """A run whose results have the strides that the op gives them on one device."""
    if call.outputs is None or call.written or call.info.is_view:
        return inner
    wanted = [_meaningful(t) if isinstance(t, Tensor) else None for t in call.outputs]
    if not any(wanted):
        return inner

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = inner(args, kwargs)
        if isinstance(result, Tensor):
            return _restrided(result, wanted[0])
        if not isinstance(result, list | tuple) or len(result) != len(wanted):
            return result
        return type(result)([_restrided(r, stride) for r, stride in zip(result, wanted, strict=True)])

    return run


def _meaningful(t: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor of several dims whose elements fill its memory without gaps, each once."""
    if t.dim() < 2 or t.numel() < 2:
        return None
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return t.stride()


def _restrided(x: Any, stride: tuple[int, ...] | None) -> Any:
    """A tensor with these strides: as it is, or a copy of its blocks in that order of dims."""
    if stride is None or not isinstance(x, DTensor) or x._spec.stride is None or x._source is not None:
        return x
    pairs = zip(x.shape, x._spec.stride, stride, strict=False)
    if len(stride) != x.dim() or all(n == 1 or have == want for n, have, want in pairs):
        return x
    order = sorted(range(x.dim()), key=lambda d: -stride[d])
    back = [order.index(d) for d in range(x.dim())]
    block = map_ranks(lambda t: torch.permute(torch.permute(t, order).contiguous(), back), x._local_tensor)
    return DTensor(block, x._spec.with_layout(x._spec.layout, stride))
