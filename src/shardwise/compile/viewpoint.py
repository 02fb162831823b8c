"""Capturing the program of another rank: its coords, and blocks of its shapes in place of those of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from shardwise.comm import PerRank, coord_of
from shardwise.comm.simulate import viewpoint
from shardwise.layout import block_shape
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.recording import empty_fake, new_fake_mode

__all__ = ["seen_from"]


@contextmanager
def seen_from(rank: int | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Be another rank inside the block, with its blocks of some DTensors; None for this process, which changes nothing.

    In a simulation the blocks are its own; elsewhere they have no values.
    """
    if rank is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(viewpoint(rank))
        mode = new_fake_mode()
        for x in {id(t): t for t in tensors}.values():
            if isinstance(x, DTensor):
                before = x._local_tensor
                stack.callback(setattr, x, "_local_tensor", before)
                x._local_tensor = _block_at(rank, x, mode)
        yield


def _block_at(rank: int, x: DTensor, mode: Any) -> Tensor:
    block = x._local_tensor
    if isinstance(block, PerRank):
        return block.of_rank(rank)
    coord = coord_of(x.device_mesh)
    if coord is None:
        return block
    shape = block_shape(x._spec.layout, coord)
    stride = _dense_stride(shape, block.stride())
    return empty_fake(None if block.is_meta else mode, shape, stride, block)


def _dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape whose dims are in the same order in memory."""
    stride, size = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[d] = size
        size *= max(shape[d], 1)
    return tuple(stride)
