"""Cutting a box out of a block and setting one in, whatever the factors of its dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout import Box

__all__ = ["box_count", "box_shape", "cut_box", "set_box"]


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the box, as a tensor of the block's dims."""
    return tuple(math.prod(counts) for counts in box.counts)


def box_count(box: Box) -> int:
    """How many elements the box has."""
    return math.prod(c for counts in box.counts for c in counts)


def cut_box(block: Tensor, box: Box) -> Tensor:
    """The box of a block, as a view where strides allow it."""
    if box.counts == box.lengths:
        return block
    inner = _narrow(_unfold(block, box), box)
    return inner if _is_flat(box) else inner.reshape(box_shape(box))


def set_box(block: Tensor, box: Box, value: Tensor) -> None:
    """Write a value of the box's size into a contiguous block."""
    inner = _narrow(block.view([n for lengths in box.lengths for n in lengths]), box)
    inner.copy_(value.reshape(inner.shape))


def _is_flat(box: Box) -> bool:
    return all(len(lengths) == 1 for lengths in box.lengths)


def _unfold(block: Tensor, box: Box) -> Tensor:
    return block if _is_flat(box) else block.reshape([n for lengths in box.lengths for n in lengths])


def _narrow(block: Tensor, box: Box) -> Tensor:
    """Narrow each dim of a block that has one dim per piece."""
    for d, (length, start, count) in enumerate(_entries(box)):
        if count != length:
            block = torch.narrow(block, d, start, count)
    return block


def _entries(box: Box) -> Sequence[tuple[int, int, int]]:
    return [
        entry
        for dims in zip(box.lengths, box.starts, box.counts, strict=True)
        for entry in zip(*dims, strict=True)
    ]
