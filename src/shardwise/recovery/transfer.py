"""Filling tensors on the new mesh from the blocks that the members hold: each asks for what it lacks, and gets exactly that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.loading import read_into, wanted_parts
from shardwise.checkpoint.metadata import StoredTensor
from shardwise.checkpoint.read import Part
from shardwise.recovery.snapshot import Snapshot
from shardwise.torch_internals.collectives import all_reduce, all_to_all, wait

__all__ = ["PeerReader", "agree_on", "exchange", "fill"]

_BATCH_BYTES = 256 << 20
"""Tensors are moved together up to this size, so that what is received needs little memory beside them."""


class PeerReader:
    """The tensors of a snapshot, for `read_into`: parts that this member holds, or has received.

    Args:
        snapshot: that of this member.
        members: those that are left, by rank in the new world.
        me: this member.
    """

    def __init__(self, snapshot: Snapshot, members: Sequence[int], me: int) -> None:
        self.snapshot, self.members, self.me = snapshot, tuple(members), me
        self.received_bytes = 0
        self._names = list(snapshot.stored)
        self._received: dict[tuple[str, Part], NDArray[Any]] = {}
        self._load = np.zeros(len(members), np.int64)

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor by one of its names."""
        return self.snapshot.tensor(name)

    def read_part(self, name: str, part: Part, out: NDArray[Any], counts: bool) -> None:
        """Copy a part into an array of its shape."""
        found = self._received.pop((name, part), None)
        out[...] = self.snapshot.read(name, part) if found is None else found.reshape(out.shape)

    def fetch(self, targets: Sequence[tuple[str, Tensor]]) -> None:
        """Receive what this member lacks for these targets, and send what others ask for; on all members."""
        asked: list[list[tuple[str, Part]]] = [[] for _ in self.members]
        for name, target in targets:
            for part, source in self._sources(name, target):
                asked[source].append((name, part))
        requests = exchange([_encode(self._names, self.snapshot, parts) for parts in asked])
        answers = [self._answer(rows) for rows in requests]
        for parts, data in zip(asked, exchange(answers), strict=True):
            self.received_bytes += data.nbytes
            at = 0
            for name, part in parts:
                stored = self.snapshot.stored[self.snapshot.name_of(name)]
                size = math.prod(part.shape) * stored.dtype.itemsize
                # copied, so that each array is aligned
                self._received[name, part] = np.frombuffer(
                    data[at : at + size].tobytes(), _bits_dtype(stored.dtype.itemsize)
                )
                at += size

    def _sources(self, name: str, target: Tensor) -> Iterator[tuple[Part, int]]:
        """The parts that this member does not hold, each with the rank to ask: of those that hold it the least asked."""
        stored = self.stored(name)
        if stored is None:
            return
        holders = self.snapshot.holders(name, stored)
        for part in wanted_parts(stored, target, self.members.index(self.me)):
            here = holders[part.cell]
            if self.me in here:
                continue
            ranks = [self.members.index(int(m)) for m in here if int(m) in self.members]
            # starting from this rank, so that ranks that ask for the same parts do not all ask the same one
            size, mine = len(self.members), self.members.index(self.me)
            source = min(ranks, key=lambda r: (self._load[r], (r - mine) % size))
            self._load[source] += math.prod(part.shape) * stored.dtype.itemsize
            yield part, source

    def _answer(self, rows: NDArray[Any]) -> NDArray[np.uint8]:
        parts = _decode(self._names, self.snapshot, rows.view(np.int64))
        data = [np.ascontiguousarray(self.snapshot.read(n, p)).reshape(-1).view(np.uint8) for n, p in parts]
        return np.concatenate(data) if data else np.empty(0, np.uint8)


def _bits_dtype(itemsize: int) -> Any:
    return {1: np.uint8, 2: np.int16, 4: np.int32}.get(itemsize, np.int64)


def _encode(names: Sequence[str], snapshot: Snapshot, parts: Sequence[tuple[str, Part]]) -> NDArray[np.uint8]:
    """Parts as numbers: the tensor, the cell, where the part begins in the cell, and its shape."""
    index = {name: i for i, name in enumerate(names)}
    flat = [n for name, p in parts for n in (index[snapshot.name_of(name)], p.cell, *p.start, *p.shape)]
    return np.asarray(flat, np.int64).view(np.uint8)


def _decode(
    names: Sequence[str], snapshot: Snapshot, numbers: NDArray[np.int64]
) -> Iterator[tuple[str, Part]]:
    flat, at = numbers.tolist(), 0
    while at < len(flat):
        name = names[flat[at]]
        ndim = len(snapshot.stored[name].layout.shape)
        start, shape = flat[at + 2 : at + 2 + ndim], flat[at + 2 + ndim : at + 2 + 2 * ndim]
        yield name, Part(flat[at + 1], tuple(start), (0,) * ndim, tuple(shape))
        at += 2 + 2 * ndim


def _device() -> torch.device:
    """Where the world's backend wants its tensors."""
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def exchange(parts: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Send bytes to each rank of the world, and return what each has sent."""
    world = dist.group.WORLD
    if world is None or len(parts) == 1:
        return list(parts)
    size, group, device = len(parts), world.group_name, _device()
    counts = torch.tensor([p.nbytes for p in parts], dtype=torch.int64, device=device)
    sent = [p.nbytes for p in parts]
    received = wait(all_to_all(counts, [1] * size, [1] * size, group)).tolist()
    data = torch.from_numpy(np.concatenate(parts)).to(device)
    found = wait(all_to_all(data, received, sent, group)).cpu().numpy()
    return [np.asarray(p) for p in np.split(found, np.cumsum(received)[:-1])]


def agree_on(*numbers: int) -> bool:
    """Whether these numbers are the same on all ranks. That this returns means that all ranks have called it."""
    world = dist.group.WORLD
    if world is None:
        return True
    mine = [n for number in numbers for n in (number, -number)]
    found = wait(all_reduce(torch.tensor(mine, dtype=torch.int64, device=_device()), "max", world.group_name))
    return bool(found.tolist() == mine)


def fill(reader: PeerReader, targets: Sequence[tuple[str, Tensor]]) -> None:
    """Fill the blocks of tensors on this rank; on all members, with the same names."""
    rank = dist.get_rank()
    for batch in _batches(reader, targets):
        reader.fetch(batch)
        for name, target in batch:
            read_into(reader, name, target, rank)


def _batches(reader: PeerReader, targets: Sequence[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Targets in batches of limited size, the same on all ranks because it counts whole tensors."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, target in targets:
        batch.append((name, target))
        size += target.numel() * target.element_size()
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
