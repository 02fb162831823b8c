"""A commit: this process's blocks as they were after a step, and enough about the layouts to know who holds the others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.bits import bits_of, empty_bits, tensor_of
from shardwise.checkpoint.description import describe_state
from shardwise.checkpoint.grid import I64, grid_of
from shardwise.checkpoint.metadata import StoredTensor
from shardwise.checkpoint.random_state import random_position
from shardwise.checkpoint.read import Part
from shardwise.checkpoint.save_plan import Stored, block_on, coord_on, positions, stored_of
from shardwise.layout import block_shape

__all__ = ["Snapshot", "describe"]


@dataclass
class Snapshot:
    """What a process keeps of a commit.

    Attributes:
        number: of the commit; the same on all members.
        members: the members of the run at that time, by rank.
        rank: of this process at that time.
        copies: blocks that fewer ranks hold are kept by a partner as well; 1 or 2.
        content: plain values, other names of tensors, and the position of the random stream, in JSON.
        stored: the layout, the ranks and the dtype of each tensor.
        blocks: copies of this process's blocks, and of those it keeps for another rank, by rank and name.
    """

    number: int
    members: tuple[int, ...]
    rank: int
    copies: int
    content: Mapping[str, Any]
    stored: Mapping[str, Stored]
    blocks: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def copy_blocks(self, tensors: Mapping[str, Tensor], before: Snapshot | None = None) -> None:
        """Copy the blocks; memory of the snapshot before is used again, or given back."""
        spare = {} if before is None else {n: b for (r, n), b in before.blocks.items() if r == before.rank}
        if before is not None:
            before.blocks.clear()
        own = {n: block_on(t, self.rank) for n, t in tensors.items() if coord_on(t, self.rank) is not None}
        for name in list(spare):
            if (
                name not in own
                or spare[name].shape != own[name].shape
                or spare[name].dtype != own[name].dtype
            ):
                del spare[name]
        with torch.no_grad():
            for name, block in own.items():
                copy = spare.pop(name, None)
                copy = torch.empty(block.shape, dtype=block.dtype) if copy is None else copy
                self.blocks[self.rank, name] = copy.copy_(block)

    # blocks that a partner keeps

    def partner_of(self, rank: int) -> int:
        """The rank that keeps copies for another one: half the world away, so that it is rarely on the same machine."""
        return (rank + len(self.members) // 2) % len(self.members)

    @property
    def guest(self) -> int:
        """The rank whose blocks this process keeps."""
        return (self.rank - len(self.members) // 2) % len(self.members)

    def needs_partner(self, name: str) -> bool:
        """Whether blocks of a tensor have one holder, and shall have two."""
        layout, ranks, *_ = self.stored[name]
        replicas = math.prod(n for a, n in enumerate(layout.axes.sizes) if a not in layout.sharded)
        return self.copies > 1 and len(self.members) > 1 and len(ranks) * replicas == 1

    def for_partner(self, tensors: Mapping[str, Tensor]) -> NDArray[np.uint8]:
        """The bytes of this process's blocks that its partner keeps."""
        data = [
            np.ascontiguousarray(bits_of(block_on(tensors[name], self.rank))).reshape(-1).view(np.uint8)
            for name in self._partnered(self.rank)
        ]
        return np.concatenate(data) if data else np.empty(0, np.uint8)

    def keep_for_guest(self, data: NDArray[np.uint8]) -> None:
        """Keep what another rank's `for_partner` returned."""
        at = 0
        for name in self._partnered(self.guest):
            layout, ranks, dtype, _ = self.stored[name]
            place = int(np.argwhere(ranks == self.guest)[0][1])
            bits = empty_bits(block_shape(layout, layout.axes.coord(place)), dtype.itemsize)
            bits.reshape(-1).view(np.uint8)[...] = data[at : at + bits.nbytes]
            self.blocks[self.guest, name] = tensor_of(bits, dtype)
            at += bits.nbytes

    def _partnered(self, rank: int) -> list[str]:
        return [n for n, s in self.stored.items() if self.needs_partner(n) and (s.ranks == rank).any()]

    # what it is compared and read by

    def digest(self) -> int:
        """A number that differs if what must be the same on all ranks does."""
        random = self.content["random"]
        same = self.content if random["agreed"] else {**self.content, "random": random["position"]}
        keys = {n: f"{s.dtype} {s.layout} {s.ranks.tolist()}" for n, s in self.stored.items()}
        text = json.dumps([same, keys], sort_keys=True).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")

    def name_of(self, name: str) -> str:
        """The name under which a tensor is kept."""
        return str(self.content["aliases"].get(name, name))

    def tensor(self, name: str) -> StoredTensor | None:
        """A tensor and the cells that its layout splits it into; None if there is none of this name."""
        known = self.stored.get(self.name_of(name))
        if known is None:
            return None
        grid = grid_of(known.layout)
        return StoredTensor(known.dtype, known.layout.shape, grid, [0] * len(grid.owners), known.is_plain)

    def _ranks_of(self, name: str, tensor: StoredTensor) -> I64:
        """For each cell the ranks whose blocks have it."""
        ranks = self.stored[self.name_of(name)].ranks[:, tensor.grid.owners]
        return ranks.swapaxes(0, 1).reshape(len(tensor.files), -1)

    def holders(self, name: str, tensor: StoredTensor) -> I64:
        """For each cell the members that hold it."""
        ranks = self._ranks_of(name, tensor)
        if self.needs_partner(self.name_of(name)):
            ranks = np.concatenate([ranks, (ranks + len(self.members) // 2) % len(self.members)], axis=1)
        return np.asarray(self.members, np.int64)[ranks]

    def lost_without(self, members: Sequence[int]) -> list[str]:
        """The tensors that these members do not hold all of."""
        return [
            name
            for name in self.stored
            if (tensor := self.tensor(name)) is not None
            and not np.isin(self.holders(name, tensor), np.asarray(members)).any(axis=1).all()
        ]

    def read(self, name: str, part: Part) -> NDArray[Any]:
        """The bits of a part of a cell that this process holds."""
        name = self.name_of(name)
        layout, ranks, *_ = self.stored[name]
        tensor = self.tensor(name)
        if tensor is None:
            raise KeyError(name)
        owner = self.rank if self.rank in self._ranks_of(name, tensor)[part.cell] else self.guest
        offset, _ = tensor.grid.box(part.cell)
        place = int(np.argwhere(ranks == owner)[0][1])
        at = positions(layout, layout.axes.coord(place), offset)
        block = self.blocks[owner, name]
        for d, (first, start, size) in enumerate(zip(at, part.start, part.shape, strict=True)):
            block = block.narrow(d, first + start, size)
        return bits_of(block)


def describe(
    state: Any, number: int, members: tuple[int, ...], rank: int, copies: int
) -> tuple[Snapshot, Mapping[str, Tensor]]:
    """The snapshot of a state, without copies yet, and the tensors that it is about."""
    described = describe_state(state)
    content = {"state": described.tree, "aliases": described.aliases, "random": random_position()}
    stored = {n: stored_of(t) for n, t in described.tensors.items()}
    return Snapshot(number, members, rank, copies, content, stored), described.tensors
