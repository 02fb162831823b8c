"""Gathered parameters that autograd saves for the backward pass are not kept, but gathered again when they are needed.

A saved tensor that shares memory with a gathered block is packed as its position in the block. Unpacking asks the group for
the block, in whatever order the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.comm import PerRank
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import has_saved_tensor_hooks, optional_saved_tensor_hooks
from shardwise.torch_internals.subclass import storage_id
from shardwise.torch_internals.tracing import never_compile

__all__ = ["BlockOwner", "forget_blocks", "packing", "register_blocks"]


class BlockOwner(Protocol):
    """What gathers blocks: a group of parameters."""

    def block_for_backward(self, slot: int, stamp: object) -> Tensor:
        """The gathered block, which must still have the value it had at `stamp`."""


class _Home(NamedTuple):
    owner: BlockOwner
    stamp: object
    slots: dict[torch.dtype, int]  # one slot of each dtype in this memory
    rank: int | None


class _Part(NamedTuple):
    """A tensor in the memory of a gathered block."""

    home: _Home
    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        block = self.home.owner.block_for_backward(self.slot, self.home.stamp)
        if self.home.rank is not None:
            block = block._blocks[self.home.rank]  # type: ignore[attr-defined]
        return block.as_strided(self.size, self.stride, self.offset)


class _Distributed(NamedTuple):
    """A DTensor whose blocks are in the memory of gathered blocks."""

    spec: Spec
    parts: dict[int | None, _Part]


_homes: dict[int, _Home] = {}


def register_blocks(owner: BlockOwner, stamp: object, blocks: list[Tensor]) -> list[int]:
    """Know the memory of gathered blocks; returns what to pass to `forget_blocks` before they are freed."""
    found = []
    for slot, block in enumerate(blocks):
        ranks = block._blocks.items() if isinstance(block, PerRank) else [(None, block)]
        for rank, b in ranks:
            key = storage_id(b)
            home = _homes.get(key)
            if home is None or home.owner is not owner:
                home = _homes[key] = _Home(owner, stamp, {}, rank)
                found.append(key)
            home.slots.setdefault(b.dtype, slot)
    return found


def forget_blocks(keys: list[int]) -> None:
    """Forget the memory of blocks that are about to be freed."""
    for key in keys:
        _homes.pop(key, None)


@contextmanager
def packing() -> Iterator[None]:
    """Pack tensors that autograd saves, except inside other hooks: those of activation checkpointing do more than that."""
    if has_saved_tensor_hooks():
        yield
    else:
        with optional_saved_tensor_hooks(_pack, _unpack):
            yield


def _pack(t: Tensor) -> Any:
    if not _homes or isinstance(t, PerRank):  # which spans all ranks: only checkpointing saves it as a whole
        return t
    if not isinstance(t, DTensor):
        return _part(t) or t
    if t._source is not None or t._spec.stride is None:
        return t
    block = t._local_tensor
    pairs = block._blocks.items() if isinstance(block, PerRank) else [(None, block)]
    parts = {rank: _part(b) for rank, b in pairs}
    known = {rank: part for rank, part in parts.items() if part is not None}
    return _Distributed(t._spec, known) if len(known) == len(parts) else t


def _part(t: Tensor) -> _Part | None:
    if t.layout is not torch.strided:
        return None
    home = _homes.get(storage_id(t))
    slot = None if home is None else home.slots.get(t.dtype)
    if home is None or slot is None or t.is_conj() or t.is_neg():
        return None
    return _Part(home, slot, tuple(t.shape), t.stride(), int(t.storage_offset()))


def _unpack(packed: Any) -> Tensor:
    match packed:
        case _Part():
            return packed.unpack()
        case _Distributed():
            blocks = {rank: part.unpack() for rank, part in packed.parts.items()}
            block = blocks[None] if None in blocks else PerRank(blocks)  # type: ignore[arg-type]
            return DTensor(block, packed.spec)
    return packed  # type: ignore[no-any-return]


for _hook in (_pack, _unpack):  # autograd calls them for tensors that compiled code saves
    never_compile(_hook)
