"""Counting writes to memory that moved views are computed from.

Ops on DTensors run beneath the code that counts versions, and local views of a block have version counters of their own. So
writes are counted here, by storage, while a moved view of it exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.call.schema import op_info
from shardwise.comm import PerRank
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import storage_id, version

__all__ = ["Memory", "known_memory", "memory_of", "note_write", "note_writes", "shares_memory", "watched"]

watched: dict[int, weakref.ref[Memory]] = {}
"""The memory of every moved view that exists, by the id of its storage. `dispatch` reads it after each op."""


class Memory:
    """The storage of a block that moved views are computed from, and how often ops on DTensors wrote to it.

    `block` keeps the storage alive, so that its id stays its own. `tail` is what follows it in tensors that have grown beyond it;
    `has_grown` if the storage itself has grown.
    """

    __slots__ = ("__weakref__", "block", "has_grown", "key", "tail", "writes")

    def __init__(self, block: Tensor) -> None:
        self.block = block
        self.key, self.writes = _key(block), 0
        self.tail: Tensor | None = None
        self.has_grown = False

    def state(self, roots: Sequence[Tensor]) -> tuple[int, int] | None:
        """What changes when blocks of this memory are written to; None if that cannot be known.

        Writes to the result of `to_local()` change the version of the block. Tensors of inference mode have none.
        """
        total = 0
        for root in roots:
            for block in root.ranks if isinstance(root, PerRank) else (root,):
                if block.is_inference():
                    return None
                total += version(block)
        return self.writes, total

    def __del__(self) -> None:
        watched.pop(self.key, None)


def memory_of(block: Tensor) -> Memory:
    """The memory of a block, whose writes are counted from now on."""
    memory = known_memory(block)
    if memory is None:
        memory = Memory(block)
        watched[memory.key] = weakref.ref(memory)
    return memory


def known_memory(block: Tensor) -> Memory | None:
    """The memory of a block if its writes are counted."""
    known = watched.get(_key(block))
    return None if known is None else known()


def note_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the writes of an op that has run."""
    info = op_info(func)
    for i in info.written:
        value = args[i] if i < len(args) else kwargs.get(info.arguments[i].name)
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, DTensor) and t._spec.stride is not None:
                note_write(t._local_tensor)


def note_write(block: Tensor) -> None:
    """Count a write to a block."""
    known = watched.get(_key(block))
    if known is not None and (memory := known()) is not None:
        memory.writes += 1


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two blocks have the same storage, in a simulation on every rank."""
    if isinstance(a, PerRank) and isinstance(b, PerRank):
        return all(shares_memory(x, b.of_rank(r)) for r, x in a._blocks.items())
    if isinstance(a, PerRank) or isinstance(b, PerRank):
        return False
    return storage_id(a) == storage_id(b)


def _first(block: Tensor) -> Tensor:
    return next(iter(block._blocks.values())) if isinstance(block, PerRank) else block


def _key(block: Tensor) -> int:
    return storage_id(_first(block))
