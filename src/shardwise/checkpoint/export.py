"""Whole tensors in safetensors files that other programs read; each rank writes its blocks to their places in the files."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwise.checkpoint.aside import aside_path
from shardwise.checkpoint.background import finish_pending
from shardwise.checkpoint.bits import bits_of
from shardwise.checkpoint.description import describe_state
from shardwise.checkpoint.errors import CheckpointError, CheckpointStateError
from shardwise.checkpoint.exchange import Report, agree, next_number, run_token
from shardwise.checkpoint.metadata import checkpoint_path
from shardwise.checkpoint.safetensors_file import header_bytes
from shardwise.checkpoint.save_plan import Item, is_alone, plan_save, stored_of, this_rank, world_size
from shardwise.checkpoint.saving import TIMEOUT
from shardwise.checkpoint.state_digest import compare_digests, state_digest
from shardwise.checkpoint.write import cell_of, sync_directory, write_errors
from shardwise.comm import is_simulated

__all__ = ["export"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Place(NamedTuple):
    """Where a tensor is: the file, and where its data begins in it."""

    file: str
    start: int


def export(
    state: nn.Module | Mapping[str, Any],
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    timeout: float = TIMEOUT,
) -> list[Path]:
    """Write whole tensors, from all ranks, as Hugging Face reads them: no rank ever holds more than its blocks.

    Args:
        state: a module, or a dict of tensors. A tensor that has several names is written under the first one.
        path: a directory, on a file system that all ranks share; files of the same names in it are replaced. They are
            `model.safetensors`, or if that is larger than `shard_bytes` several and `model.safetensors.index.json`.
        dtype: convert floating point tensors to it.
        shard_bytes: the size at which a new file begins.
        timeout: seconds to wait for the other ranks.

    Returns:
        The data files.

    Raises:
        CheckpointStateError: a value is not a tensor, or the ranks have different keys.
        CheckpointWriteError: a rank could not write. Nothing was replaced then.

    Ranks tell each other the outcome through the store of the process group; there are no collectives.
    """
    finish_pending()
    export = _Export(checkpoint_path(path), dtype, timeout)
    return export.run(state, shard_bytes)


class _Export:
    def __init__(self, path: Path, dtype: torch.dtype | None, timeout: float) -> None:
        self.path, self.dtype, self.timeout = path, dtype, timeout
        self.aside = path / ".export"
        self.headers: dict[str, bytes] = {}
        self.places: dict[str, _Place] = {}
        self.sizes: dict[str, int] = {}

    def run(self, state: nn.Module | Mapping[str, Any], shard_bytes: int) -> list[Path]:
        first, second = next_number("export"), next_number("export")
        described: list[Mapping[str, Tensor]] = []

        def describe() -> Report:
            self.aside = aside_path(self.path / "export", run_token(self.timeout, is_alone()))
            tensors = self._describe(state, shard_bytes)
            described.append(tensors)
            return state_digest({n: f"{stored_of(t).layout}" for n, t in tensors.items()}, None, self.path)

        def write() -> Report:
            with write_errors(self.path):
                for rank in range(world_size()) if is_simulated() else [this_rank()]:
                    self._write(rank, described[0])
            return {}

        try:
            agree(first, describe, self._create, self.timeout, is_alone())
            agree(second, write, self._commit, self.timeout, is_alone())
        except CheckpointError:
            if this_rank() == 0:
                shutil.rmtree(self.aside, ignore_errors=True)
            raise
        return [self.path / name for name in self.headers]

    def _describe(self, state: nn.Module | Mapping[str, Any], shard_bytes: int) -> Mapping[str, Tensor]:
        """The tensors by name, and where each of them goes."""
        described = describe_state(state)
        names = {*described.tensors, *described.aliases}
        plain = [] if not isinstance(described.tree, dict) else [k for k in described.tree if k not in names]
        if "__metadata__" in names:
            raise CheckpointStateError(
                "export got a tensor with the name '__metadata__'.",
                why="Headers of safetensors files have other things under this key.",
                fix="Rename it.",
            )
        if not described.tensors or plain:
            raise CheckpointStateError(
                f"export got values that are not tensors: {plain[:10] or described.tree}.",
                why="The files have tensors by name and nothing else.",
                fix="Pass a module, or model.state_dict(); save(...) keeps other values.",
            )
        files: list[list[str]] = [[]]
        size = 0
        for name, tensor in described.tensors.items():
            count = tensor.numel() * self._dtype(tensor).itemsize
            if files[-1] and size + count > shard_bytes:
                files.append([])
                size = 0
            files[-1].append(name)
            size += count
        for i, members in enumerate(files):
            file = _SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            entries = [
                (n, self._dtype(described.tensors[n]), tuple(described.tensors[n].shape)) for n in members
            ]
            self.headers[file] = header = header_bytes(entries, {"format": "pt"})
            at = len(header)
            for n, kind, _ in entries:
                self.places[n] = _Place(file, at)
                at += described.tensors[n].numel() * kind.itemsize
            self.sizes[file] = at
        return described.tensors

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _create(self, reports: Sequence[Report]) -> Report:
        """On rank 0: files of the right size, with their headers."""
        compare_digests(reports, "export")
        with write_errors(self.path):
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(parents=True)
            for file, header in self.headers.items():
                with (self.aside / file).open("wb") as stream:
                    stream.write(header)
                    os.posix_fallocate(stream.fileno(), 0, self.sizes[file])  # a full disk is an error now
        return {}

    def _write(self, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's cells of all tensors."""
        plan = plan_save({n: stored_of(t) for n, t in tensors.items()}, world_size())
        items = plan.items_of(rank)
        for file in {self.places[item.name].file: None for item in items}:
            with (self.aside / file).open("r+b") as stream:
                for item in items:
                    if self.places[item.name].file == file:
                        block = cell_of(tensors[item.name], item, rank)
                        bits = bits_of(block.to(self._dtype(block)))
                        start = self.places[item.name].start
                        _write_box(stream.fileno(), start, tuple(tensors[item.name].shape), item, bits)
                os.fsync(stream.fileno())

    def _commit(self, reports: Sequence[Report]) -> Report:
        """On rank 0: the files take their places, the index last."""
        with write_errors(self.path):
            for file in self.headers:
                os.replace(self.aside / file, self.path / file)
            if len(self.headers) > 1:
                index = {
                    "metadata": {"total_size": sum(self.sizes[f] - len(h) for f, h in self.headers.items())},
                    "weight_map": {name: place.file for name, place in self.places.items()},
                }
                (self.aside / _INDEX).write_text(json.dumps(index, indent=2))
                os.replace(self.aside / _INDEX, self.path / _INDEX)
            sync_directory(self.path)
            shutil.rmtree(self.aside, ignore_errors=True)
        return {}


def _write_box(descriptor: int, start: int, shape: tuple[int, ...], item: Item, bits: NDArray[Any]) -> None:
    """Write a box of a tensor of this shape, whose data begins at `start`, through mapped memory."""
    if bits.size == 0:
        return
    words = bits.shape[len(shape) :]  # elements of 16 bytes are two words
    full = (*shape, *words)
    strides = [bits.itemsize * int(np.prod(full[d + 1 :], dtype=np.int64)) for d in range(len(full))]
    offset = (*item.offset, *[0] * len(words))
    first = start + sum(o * s for o, s in zip(offset, strides, strict=True))
    length = sum((n - 1) * s for n, s in zip(bits.shape, strides, strict=True)) + bits.itemsize
    page = first % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, length + page, offset=first - page) as mapped:
        target = np.ndarray(bits.shape, bits.dtype, mapped, page, strides)
        np.copyto(target, bits)
        del target
