"""Loading: each rank reads its blocks, and the ranks agree that all is well."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.bits import bits_of, empty_bits, tensor_of
from shardwise.checkpoint.checksum import MODULUS
from shardwise.checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from shardwise.checkpoint.exchange import Report, agree, next_number
from shardwise.checkpoint.metadata import METADATA, StoredTensor, resolve_path, version_at
from shardwise.checkpoint.random_state import set_random_position
from shardwise.checkpoint.read import Part, Reader, parts_of
from shardwise.checkpoint.restore import Restoration, plan_restore
from shardwise.checkpoint.save_plan import (
    block_on,
    coord_on,
    is_alone,
    stored_of,
    this_rank,
    world_size,
)
from shardwise.checkpoint.saving import TIMEOUT
from shardwise.checkpoint.state_digest import compare_digests, state_digest
from shardwise.checkpoint.torch_format import TORCH_METADATA, TorchReader
from shardwise.comm import is_simulated
from shardwise.layout import owned
from shardwise.tensor.dtensor import DTensor

__all__ = ["Loading", "open_checkpoint", "read_into", "wanted_parts"]


def open_checkpoint(path: Path) -> Reader:
    """The reader of a checkpoint of ours, or of one that torch.distributed.checkpoint has written."""
    if not os.path.exists(path / METADATA) and os.path.exists(path / TORCH_METADATA):
        return TorchReader.of(path)
    return Reader.of(path)


class Loading:
    """A load; it counts the bytes that this process reads."""

    def __init__(self, path: Path, strict: bool = True, timeout: float = TIMEOUT) -> None:
        self._asked = path
        self.path, self.strict, self.timeout = resolve_path(path), strict, timeout
        self.number = next_number("load")
        self.reader: Reader | None = None

    def run(self, into: Any, random: bool) -> Any:
        """Read, agree with the other ranks that all is well, and set what is not a tensor."""
        found: list[tuple[Reader, Restoration, Any]] = []

        def work() -> Report:
            try:
                self.reader = open_checkpoint(self.path)
                plan, after = self._read(self.reader, into)
            except (CorruptCheckpointError, NoCheckpointError) as error:
                raise self._replaced() or error from error.__cause__
            found.append((self.reader, plan, after))
            return self._report(self.reader, plan, into)

        agree(self.number, work, self._check, self.timeout, is_alone())
        ((reader, plan, after),) = found
        for setter in plan.setters:
            setter()
        if random and reader.metadata.random is not None:
            set_random_position(reader.metadata.random)
        return after

    def _read(self, reader: Reader, into: Any) -> tuple[Restoration, Any]:
        """Fill the tensors of this process; what is to be set then, and the state."""
        try:
            plan, after = plan_restore(into, reader.metadata.tree, reader.stored, self.strict, self.path)
            for name, target in plan.tensors:
                all_ranks = isinstance(target, DTensor) and is_simulated()
                for rank in range(world_size()) if all_ranks else [this_rank()]:
                    read_into(reader, name, target, rank)
        finally:
            reader.close()
        return plan, after

    def _report(self, reader: Reader, plan: Restoration, into: Any) -> Report:
        keys = {n: str(stored_of(t).layout) for n, t in plan.tensors}
        return {
            "partial": [[*key, *sums] for key, sums in reader.partial.items()],
            "version": reader.metadata.version,
            **state_digest({} if into is None else keys, into is None, self.path),
        }

    def _replaced(self) -> CheckpointError | None:
        """The error for a checkpoint that was replaced while it was read, rather than damaged or not there."""
        read = "" if self.reader is None else self.reader.metadata.version
        now = version_at(resolve_path(self._asked))
        return replaced_error(self._asked) if now not in ("", read) else None

    def _check(self, reports: Sequence[Report]) -> Report:
        if len({r["version"] for r in reports}) > 1:
            raise replaced_error(self._asked)
        compare_digests(reports, "load")
        totals: dict[tuple[str, int], tuple[int, int]] = {}
        for name, cell, found, expected in (p for r in reports for p in r["partial"]):
            totals[name, cell] = (totals.get((name, cell), (0, 0))[0] + found) % MODULUS, expected
        for (name, cell), (found, expected) in totals.items():
            if found != expected and self.reader is not None:
                raise self.reader.damaged_cell(name, cell)
        return {}


def replaced_error(path: Path) -> CheckpointError:
    """The error for a checkpoint that another one took the place of while it was being read."""
    return CheckpointError(
        f"The checkpoint {path} was replaced while it was being loaded.",
        why="Another run, or a save in the background, wrote to the same path.",
        fix="Load it again when it is complete; give each checkpoint a path of its own, as CheckpointManager does.",
    )


class PartReader(Protocol):
    """What `read_into` reads from: the files of a checkpoint, or the memory of other ranks."""

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor by one of its names."""

    def read_part(self, name: str, part: Part, out: NDArray[Any], counts: bool) -> None:
        """Read a part of a cell into an array of its shape."""


def read_into(reader: PartReader, name: str, target: Tensor, rank: int) -> None:
    """Fill the block of a rank."""
    stored, coord = reader.stored(name), coord_on(target, rank)
    if stored is None or coord is None:
        return
    block = block_on(target, rank)
    counts = not isinstance(target, DTensor) or _answers(target, coord, rank)
    direct = (
        block.dtype == stored.dtype
        and block.device.type == "cpu"
        and not block.is_conj()
        and not block.is_neg()
    )
    bits = bits_of(block) if direct else empty_bits(tuple(block.shape), stored.dtype.itemsize)
    for part in wanted_parts(stored, target, rank):
        box: Any = tuple(slice(a, a + n) for a, n in zip(part.local, part.shape, strict=True))
        reader.read_part(name, part, bits[(*box, ...)], counts)
    with torch.no_grad():
        if not direct:
            block.copy_(tensor_of(bits, stored.dtype))
        torch.autograd.graph.increment_version(block)
        torch.autograd.graph.increment_version(target)


def wanted_parts(stored: StoredTensor, target: Tensor, rank: int) -> list[Part]:
    """The parts of stored cells that the block of a rank consists of; a plain tensor is its own block."""
    if not isinstance(target, DTensor):
        return parts_of(stored, [range(n) for n in stored.shape])
    coord = coord_on(target, rank)
    return [] if coord is None else parts_of(stored, owned(target.sharding, coord))


def _answers(target: Tensor, coord: Sequence[int], rank: int) -> bool:
    """Whether this rank is the first of those that hold its block."""
    layout, ranks, *_ = stored_of(target)
    return rank in ranks[0].tolist() and all(c == 0 for a, c in enumerate(coord) if a not in layout.sharded)
