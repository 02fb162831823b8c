"""Copies of the cells that a rank writes, in one piece of memory that the next save uses again."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.bits import bits_of
from shardwise.checkpoint.save_plan import Item, SavePlan
from shardwise.checkpoint.write import cell_of

__all__ = ["Staged", "bits_in", "release_memory", "stage"]


def bits_in(tensors: Mapping[str, Tensor], rank: int) -> Callable[[Item], NDArray[Any]]:
    """The cells of tensors as they are now."""
    return lambda item: bits_of(cell_of(tensors[item.name], item, rank))


_spare: list[mmap.mmap] = []
"""The memory of the last save, for the next one: to fill new pages takes ten times as long as to copy into old ones."""


def release_memory() -> None:
    """Give the memory that `async_save` keeps for the next save back to the system.

    It keeps at most one copy of what this rank writes. `CheckpointManager` gives it back at the end of its `with` block.
    """
    _spare.clear()


class Staged:
    """The copied cells of a rank."""

    def __init__(self, size: int) -> None:
        spare = _spare.pop() if _spare else None
        if spare is None or not size <= len(spare) <= 2 * size:
            # memory of the system, not of an allocator that would keep it; shared memory takes twice as long to fill
            private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
            spare = mmap.mmap(-1, max(size, 1), flags=private)
        self._memory = spare
        self._used = 0
        self._cells: dict[tuple[str, int], NDArray[Any]] = {}

    def give_back(self) -> None:
        """Keep the memory for the next save: the cells have been written."""
        self._cells.clear()
        _spare[:] = [self._memory]

    def keep(self, item: Item, bits: NDArray[Any]) -> None:
        """Copy a cell."""
        copy = np.ndarray(bits.shape, bits.dtype, self._memory, self._used)
        np.copyto(copy, bits)
        self._used += bits.nbytes
        self._cells[item.name, item.cell] = copy

    def cells(self, item: Item) -> NDArray[Any]:
        """A copied cell; it is given out once."""
        return self._cells.pop((item.name, item.cell))


def stage(plan: SavePlan, rank: int, tensors: Mapping[str, Tensor]) -> Staged:
    """Copy what a rank writes."""
    out, bits = Staged(plan.bytes_of(rank)), bits_in(tensors, rank)
    for item in plan.items_of(rank):  # by the size of elements, so that each copy is aligned
        out.keep(item, bits(item))
    return out
