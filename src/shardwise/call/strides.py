"""Strides of tensors and of their blocks.

The dims of a block have the same order in memory as those of the tensor. A block that was moved is contiguous whatever the
strides of its tensor are, and kernels give their results the order of their operands. Where the two differ, `is_contiguous()`
of the tensor would say something else than that of its block.

Results that the op itself did not compute, of programs of other ops and of ops on gathered tensors, get the strides that the op
gives them on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any

from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.call.op_call import OpCall
from shardwise.call.route import Run
from shardwise.comm import map_ranks
from shardwise.layout import is_dense
from shardwise.layout.sizes import cached
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "copy_into",
    "in_order",
    "match_strides",
    "may_overlap",
    "memory_order",
    "restride",
    "with_own_strides",
]


@cached(4096)
def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The dims from the outermost in memory to the innermost.

    >>> memory_order((2, 3), (3, 1)), memory_order((2, 3), (1, 2)), memory_order((2, 1), (1, 1))
    ((0, 1), (1, 0), (0, 1))
    """
    order = list(range(len(shape)))
    several = [
        d for d in order if shape[d] > 1
    ]  # dims of size 1 stay where they are: their strides mean nothing
    for place, d in zip(several, sorted(several, key=lambda d: -stride[d]), strict=True):
        order[place] = d
    return tuple(order)


def in_order(block: Tensor, order: tuple[int, ...]) -> Tensor:
    """A block whose dims are in memory in this order and without gaps: itself, or a copy."""
    if all(map(eq, order, range(len(order)))):
        return block.contiguous()
    moved = block.permute(order)
    if moved.is_contiguous():
        return block
    return moved.contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def match_strides(result: Any) -> Any:
    """Results of an op, not views, with blocks whose dims are in memory in the order that the strides say."""

    def matched(x: Any) -> Any:
        if (
            type(x) is DTensor
            and x._spec.stride is not None
            and not may_overlap(x._spec.shape, x._spec.stride)
        ):
            if 0 in x._spec.shape:
                x._local_tensor = map_ranks(restride, x._local_tensor, x._spec.stride)
            else:
                order = memory_order(tuple(x._spec.shape), x._spec.stride)
                x._local_tensor = map_ranks(in_order, x._local_tensor, order)
        return x

    return map_leaves(matched, result)


def restride(full: Tensor, stride: Sequence[int]) -> Tensor:
    """A full tensor with these strides, if it does not have them: a copy."""
    if full.stride() == tuple(stride):
        return full
    if not full.numel():
        return full.new_empty_strided(full.shape, stride)  # kernels look at them nevertheless
    dense = full
    for d, s in enumerate(stride):
        if s == 0:
            dense = dense.narrow(d, 0, 1)
    return full.new_empty_strided(dense.shape, stride).copy_(dense).expand(full.shape)


def may_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides may share memory, as those of `expand` and `unfold` do.

    >>> may_overlap((2, 3), (3, 1)), may_overlap((2, 3), (0, 1)), may_overlap((4, 2), (1, 1))
    (False, True, True)
    """
    extent = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= extent:
                return True
            extent += (size - 1) * step
    return False


def copy_into(target: Tensor, value: Tensor) -> None:
    """Write to a tensor, some of whose elements may be one: those have one value, which is written once."""
    value = value.expand(target.shape)
    for d, (step, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if step == 0 and size > 1:
            target, value = target.narrow(d, 0, 1), value.narrow(d, 0, 1)
    target.copy_(value)


def with_own_strides(call: OpCall, inner: Run) -> Run:
    """A run whose results have the strides that the op gives them on one device."""
    if call.outputs is None or call.info.returned is not None or call.info.is_view:
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
        strides = iter(wanted)
        return map_leaves(lambda r: _restrided(r, next(strides)), result)

    return run


def _meaningful(t: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor of several dims whose elements fill its memory without gaps, each once."""
    return t.stride() if t.dim() > 1 and t.numel() > 1 and is_dense(t.shape, t.stride()) else None


def _restrided(x: Any, stride: tuple[int, ...] | None) -> Any:
    """A tensor with these strides: as it is, or a copy of its blocks in that order of dims."""
    if stride is None or not isinstance(x, DTensor) or x._spec.stride is None or x._source is not None:
        return x
    pairs = zip(x.shape, x._spec.stride, stride, strict=False)
    if len(stride) != x.dim() or all(n == 1 or have == want for n, have, want in pairs):
        return x
    order = tuple(sorted(range(x.dim()), key=lambda d: -stride[d]))
    return DTensor(map_ranks(in_order, x._local_tensor, order), x._spec.with_layout(x._spec.layout, stride))
