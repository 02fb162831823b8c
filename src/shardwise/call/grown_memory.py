"""Tensors that grew beyond the memory that they share with others, by `resize_`.

On one device their storage grows, and tensors that share it still do. So does that of a block that every rank holds in full.
The blocks of a split tensor cannot grow so: elements would get other owners, and other tensors have the blocks as they are. There,
the new elements have memory of their own, the same on each rank, and what has grown is a view of the old blocks and of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import gather, write_back
from shardwise.call.moved_view import MovedView
from shardwise.call.view_source import ViewSource
from shardwise.call.writes import known_memory, memory_of, note_write
from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Layout, Spec, is_dense
from shardwise.plan.settings import override_settings
from shardwise.tensor.copy_methods import copy_block
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import view_base

__all__ = ["GrownSource", "grown"]

_MEMORY = (
    "_shardwise_memory"  # keeps what is known of a memory, as long as a tensor that has grown there exists
)
_resize = torch.ops.aten.resize_.default
_PART = """resize_ to {shape} was called on the DTensor {spec}, whose blocks are parts of a larger memory.
  why: On one device it would contain what follows in that memory, and for a DTensor nothing tells what that is.
  fix: x = x.clone() before x.resize_(...); or resize the tensor that it is a part of."""


class GrownSource(ViewSource):
    """How a tensor that has grown is computed: the elements of a memory from `offset` on, of which those of `base` are the first."""

    __slots__ = ("offset",)
    is_grown = True

    def __init__(self, base: DTensor, offset: int, spec: Spec) -> None:
        super().__init__(base, _resize, (list(spec.shape),), {}, None)
        self.spec, self.offset = spec, offset
        missing = offset + math.prod(spec.shape) - base.numel() if spec.shape else 0
        self.memory.tail = _extended(self.memory.tail, base, max(missing, 0))

    def read(self) -> Tensor:
        """The block, computed anew if the memory was written to."""
        if not self.is_held and (self.seen is None or self.seen != self.memory.state(self.roots)):
            with torch.no_grad():
                self.block = map_ranks(self._part, gather(self.func, self.base), self.memory.tail)
            self.seen = self.memory.state(self.roots)
        return self.block

    def _part(self, old: Tensor, tail: Tensor) -> Tensor:
        memory = torch.cat([_flat(old), tail])
        return memory[self.offset :].clone().as_strided(self.spec.shape, self.spec.stride or ())

    def write_back(self) -> None:
        """Write the block into the old blocks and the new memory."""
        start, end = self.offset, self.base.numel()

        def write_new(value: Tensor, tail: Tensor) -> None:
            skipped = max(start - end, 0)
            new = _flat(value)[max(end - start, 0) :]
            tail[skipped : skipped + new.numel()].copy_(new)

        def write_old(full: Tensor, value: Tensor) -> None:
            part = _flat(full)[start:]
            part[: value.numel()].copy_(_flat(value)[: part.numel()])

        # the view is written already: refusing to communicate now would leave view and base different
        with torch.no_grad(), override_settings(implicit="allow"):
            map_ranks(write_new, self.block, self.memory.tail)
            if start < end:
                full = gather(self.func, self.base)
                map_ranks(write_old, full, self.block)
                write_back(self.func, self.base, full)
        note_write(self.roots[0])
        self.seen = self.memory.state(self.roots)

    def copied(self, base: DTensor, memo: dict[int, Any]) -> ViewSource:
        """The same for a copy of the memory."""
        out = GrownSource(base, self.offset, self.spec)
        if self.memory.tail is not None:
            out.memory.tail = copy_block(self.memory.tail, memo)
        out.read()
        return out


def _flat(full: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return full.as_strided((full.numel(),), (1,), full.storage_offset())


def _extended(tail: Tensor | None, base: DTensor, size: int) -> Tensor:
    """The memory after that of `base`: at least so many elements, in the storage that it had before."""
    if tail is None:
        like = base._local_tensor
        return map_ranks(lambda b: b.new_zeros(size), like)  # type: ignore[no-any-return]
    return map_ranks(_grow_block, tail, [size]) if size > _first(tail).numel() else tail


def _first(block: Tensor) -> Tensor:
    return block.ranks[0] if isinstance(block, PerRank) else block


def _grow_block(block: Tensor, shape: Sequence[int], form: Any = torch.contiguous_format) -> Tensor:
    """A larger tensor in the storage of a block, which grows. What is new is zero, as it must be the same on each rank."""
    out, before = block.detach(), block.untyped_storage().nbytes()
    out.resize_(shape, memory_format=form)
    _flat(out)[before // out.dtype.itemsize :].zero_()
    return out


def grown(x: DTensor, shape: Sequence[int], form: torch.memory_format | None) -> DTensor | None:
    """A tensor of another shape that begins where `x` begins in memory and reaches beyond it; None if it does not.

    Nothing of `x` changes, except that the storage of blocks that all ranks hold in full grows.
    """
    if tuple(shape) == tuple(x.shape) or (x.is_contiguous() and math.prod(shape) <= x.numel()):
        return None
    root, offset = view_base(x), x.storage_offset()
    memory = root if isinstance(root, DTensor) else x
    source = memory._source
    size = math.prod(shape)
    known = memory.numel() if source is None or not source.is_grown else source.base.numel()
    if not known or x._spec.stride is None or min(shape, default=0) < 0:
        return None
    if (offset + size) * x.element_size() <= memory.numel() * memory.element_size():
        return None
    like = torch.empty(shape, device="meta").contiguous(memory_format=form or torch.contiguous_format)
    stride = like.stride()
    if memory.dtype is not x.dtype:
        raise RuntimeError(_PART.format(shape=tuple(shape), spec=x._spec))
    if source is not None and source.is_grown:
        memory, offset = source.base, offset + source.offset
    elif source is not None or not _is_whole(memory):
        raise RuntimeError(_PART.format(shape=tuple(shape), spec=x._spec))
    spec = memory._spec
    layout = Layout.replicated(shape, spec.layout.axes)
    if source is None and memory is x and not spec.layout.sharded:
        layout = layout.with_partial(dict(spec.layout.partial))
        x.__dict__[_MEMORY] = shared = memory_of(x._local_tensor)
        shared.has_grown = True
        block = map_ranks(_grow_block, x._local_tensor, list(shape), form or torch.contiguous_format)
        return DTensor(block, Spec(spec.mesh, layout, spec.dtype, torch.Size(shape), stride))
    of_view = Spec(spec.mesh, layout, spec.dtype, torch.Size(shape), stride)
    new = GrownSource(memory, offset, of_view)
    out = MovedView(new.read(), of_view)
    out._local_tensor = new
    return out


def _is_whole(x: DTensor) -> bool:
    """Whether the blocks of a tensor are all that there is in their storages, and the order of its elements there is known."""
    block = x._local_tensor
    has_grown = (memory := known_memory(block)) is not None and memory.has_grown
    return is_dense(x.shape, x.stride()) and all(
        b.storage_offset() == 0
        and (has_grown or b.untyped_storage().nbytes() == b.numel() * b.dtype.itemsize)
        for b in (block.ranks if isinstance(block, PerRank) else (block,))
    )
