"""Kernels on blocks: steps of local programs that no op of torch does alone, because they look at strides or offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import contiguous_stride

__all__ = ["BLOCK_KERNELS"]

aten = torch.ops.aten
_ALIGNMENT = 16  # bytes; grouped products need strides of whole multiples


def _view(block: Tensor, shape: list[int]) -> Tensor:
    """A view if the block's strides allow one: a block may be less contiguous than the global strides suggest."""
    try:
        return aten.view.default(block, shape)  # type: ignore[no-any-return]
    except RuntimeError:
        return block.reshape(shape)


def _contiguous(block: Tensor) -> Tensor:
    """A contiguous block, whose dims of size 1 also have the strides of one: kernels may look at these."""
    block = block.contiguous()
    stride = contiguous_stride(block.shape)
    return block if block.stride() == stride else block.as_strided(block.shape, stride)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None,
    start: int,
    group: int,
    shape: list[int],
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The part of a grouped matrix product that a rank computes from its blocks.

    Args:
        a: the block of the left operand.
        b: the block of the right operand.
        offsets: the end of each group of the full tensor, where an operand is 2D.
        start: the position of the block's first row or column along the dim that is cut into groups.
        group: the number of the first group of the 3D operand's block, where the other operand is 2D.
        shape: the shape of the result, in which positions of groups that are not in the block are 0.
        out_dtype: the dtype of the result, if given.
    """
    if 0 in a.shape or 0 in b.shape or 0 in shape:
        return a.new_zeros(shape, dtype=out_dtype)

    def multiply(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
        return aten._grouped_mm.default(_aligned(a), _aligned(b), ends, None, out_dtype).contiguous()  # type: ignore[no-any-return]

    if offsets is None:
        return multiply(a, b, None)
    by_rows = a.dim() == 2
    jagged, experts, d = (a, b, 0) if by_rows else (b, a, 1)
    size = jagged.shape[d] if a.dim() != b.dim() else b.shape[0]
    ends = (offsets - start).clamp(0, size)
    if a.dim() == b.dim() or experts.shape[0] == offsets.shape[0]:
        return multiply(a, b, ends)
    # The kernel's first group begins at 0: groups of other ranks that precede it are rotated to the end.
    mine = ends[group : group + experts.shape[0]]
    positions = torch.arange(size, device=jagged.device)
    before = ends[group - 1] if group else None
    if before is not None:
        mine = mine - before
        jagged = jagged.index_select(d, (positions + before) % size)
    out = multiply(jagged, experts, mine) if by_rows else multiply(experts, jagged, mine)
    is_absent = positions >= mine[-1]
    out = out.masked_fill(is_absent.unsqueeze(1 - d), 0)
    return out if before is None else out.index_select(d, (positions - before) % size)


def _aligned(x: Tensor) -> Tensor:
    """A tensor as the kernel of grouped products accepts it: copied if its rows do not begin at multiples of 16 bytes."""
    unit = _ALIGNMENT // x.element_size()
    (rows, columns), (down, along) = x.shape[-2:], x.stride()[-2:]
    is_row_major = along == 1 and down >= columns and down % unit == 0
    is_column_major = down == 1 and along >= rows and along % unit == 0
    if (is_row_major or is_column_major) and x.storage_offset() % unit == 0:
        return x
    padded = x.new_zeros((*x.shape[:-1], -(-columns // unit) * unit))
    return padded[..., :columns].copy_(x)


BLOCK_KERNELS: Mapping[str, Callable[..., Any]] = {
    "aten.view.default": _view,
    "blocks.contiguous": _contiguous,
    "blocks.grouped_mm": _grouped_mm,
}
"""By the names that steps have: an op that they replace, or a name of their own."""
