"""Strides of blocks: their dims have the same order in memory as those of the tensor.

A block that was moved is contiguous whatever the strides of its tensor are, and kernels give their results the order of their
operands. Where the two differ, `is_contiguous()` of the tensor would say something else than that of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.comm import map_ranks
from shardwise.tensor.dtensor import DTensor

__all__ = ["match_strides", "restride"]


@lru_cache(maxsize=4096)
def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost; None if elements share memory or are not adjacent.

    >>> memory_order((2, 3), (3, 1)), memory_order((2, 3), (1, 2)), memory_order((2, 3), (0, 1))
    ((0, 1), (1, 0), None)
    """
    dims = range(len(shape))
    order = tuple(sorted(dims, key=lambda d: (-stride[d] if shape[d] != 1 else -_next(shape, stride, d), d)))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1:
            if stride[d] != expected:
                return None
            expected *= shape[d]
    return order


def _next(shape: Sequence[int], stride: Sequence[int], dim: int) -> int:
    """The stride that a dim of size 1 would have beside the next dim that has more elements."""
    return next((stride[d] for d in range(dim + 1, len(shape)) if shape[d] != 1), 0)


def _in_order(block: Tensor, order: tuple[int, ...]) -> Tensor:
    moved = block.permute(order)
    if moved.is_contiguous():
        return block
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return moved.contiguous().permute(inverse)


def match_strides(result: Any) -> Any:
    """Results of an op, not views, with blocks whose dims are in memory in the order that the strides say."""

    def matched(x: Any) -> Any:
        if type(x) is DTensor and x._spec.stride is not None and 0 not in x._spec.shape:
            order = memory_order(tuple(x._spec.shape), x._spec.stride)
            if order is not None:
                x._local_tensor = map_ranks(_in_order, x._local_tensor, order)
        return x

    return map_leaves(matched, result)


def restride(full: Tensor, stride: Sequence[int]) -> Tensor:
    """A full tensor with these strides, if it does not have them: a copy."""
    if full.stride() == tuple(stride) or not full.numel():
        return full
    dense = full
    for d, s in enumerate(stride):
        if s == 0:
            dense = dense.narrow(d, 0, 1)
    return full.new_empty_strided(dense.shape, stride).copy_(dense).expand(full.shape)
