"""Our files under the interfaces of torch.distributed.checkpoint: `dcp.save(..., storage_writer=StorageWriter(path))`.

Imported when it is first asked for: torch.distributed.checkpoint imports torch's DTensor.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.futures import Future

from shardwise.checkpoint.aside import aside_path, own_token
from shardwise.checkpoint.bits import bits_of, empty_bits, tensor_of
from shardwise.checkpoint.loading import open_checkpoint
from shardwise.checkpoint.metadata import checkpoint_path, grid_of_chunks, resolve_path
from shardwise.checkpoint.read import Part, Reader
from shardwise.checkpoint.safetensors_file import dtype_name
from shardwise.checkpoint.save_plan import Item
from shardwise.checkpoint.torch_format import tree_of
from shardwise.checkpoint.values import TAG, children, decode, encode, tensor_name
from shardwise.checkpoint.write import commit, file_name, write_errors, write_file

__all__ = ["StorageReader", "StorageWriter"]


class StorageWriter(storage.StorageWriter):
    """Writes a checkpoint of ours for `torch.distributed.checkpoint.save`; values must be plain, as for `save`.

    Args:
        path: the directory of the checkpoint; `checkpoint_id` of `dcp.save` replaces it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checkpoint_path(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint."""
        if checkpoint_id is not None:
            self.path = checkpoint_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: each rank makes the directory when it writes."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with the number of the file that each rank writes, and the token of this run."""
        token = own_token()
        return [dataclasses.replace(plan, storage_data=(rank, token)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Write the chunks of this rank into one file; values are passed to the coordinator in JSON."""
        number, token = plan.storage_data
        aside = aside_path(self.path, token)
        tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
        tensors.sort(key=lambda i: -_data(i).properties.dtype.itemsize)
        with write_errors(self.path):
            aside.mkdir(parents=True, exist_ok=True)
            entries = [(_name(i), _data(i).properties.dtype, tuple(_data(i).chunk.sizes)) for i in tensors]
            bits = (bits_of(planner.resolve_data(i)) for i in tensors)  # type: ignore[arg-type]
            report = write_file(aside / file_name(number), entries, bits) if tensors else {"file": None}
        out = [storage.WriteResult(i.index, 0, {**report, "number": number}) for i in tensors]
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                data: Any = planner.resolve_data(item)
                data.seek(0)
                value = torch.load(data, weights_only=True)
                stored = {"value": encode(value, item.index.fqn, _no_tensor)}
                out.append(storage.WriteResult(item.index, 0, stored))
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(out)
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Make the files of all ranks a checkpoint."""
        found = [r for of_rank in results for r in of_rank]
        reports: list[dict[str, Any]] = [{"file": None}] * len(results)
        where, values = {}, {}
        for r in found:
            if "value" in r.storage_data:
                values[r.index.fqn] = r.storage_data["value"]
            else:
                reports[r.storage_data["number"]] = r.storage_data
                where[r.index.fqn, tuple(r.index.offset or ())] = r.storage_data["number"]
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata):
                chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
                grid, _ = grid_of_chunks(entry.size, chunks)
                files = [where[name, grid.box(i)[0]] for i in range(len(grid.owners))]
                cuts = [c.tolist() for c in grid.cuts]
                dtype = dtype_name(entry.properties.dtype)
                tensors[name] = {"dtype": dtype, "shape": list(entry.size), "cuts": cuts, "files": files}
                values[name] = {TAG: "tensor", "name": name}
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        tree = tree_of({tuple(paths.get(name, (name,))): value for name, value in values.items()})
        with write_errors(self.path):
            commit(
                self.path,
                aside_path(self.path, own_token()),
                {"state": tree, "aliases": {}, "random": None, "tensors": tensors},
                reports,
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the path of a directory, rather than an address."""
        return "://" not in str(checkpoint_id)


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _name(item: WriteItem) -> str:
    chunk, size = _data(item).chunk, tuple(_data(item).size)
    part = Item(item.index.fqn, 0, tuple(chunk.offsets), tuple(chunk.sizes))
    return part.name_in_file(1 if tuple(chunk.sizes) == size else 2)


def _no_tensor(tensor: torch.Tensor, path: str) -> str:
    raise ValueError(f"{path} is a value that has a tensor in it")


class StorageReader(storage.StorageReader):
    """Reads a checkpoint of ours for `torch.distributed.checkpoint.load`; chunks are read as a whole and checked.

    Args:
        path: the directory of the checkpoint; `checkpoint_id` of `dcp.load` replaces it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checkpoint_path(path)
        self._reader: Reader | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read a checkpoint."""
        self._reader = None
        if checkpoint_id is not None:
            self.path = checkpoint_path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The metadata in torch's form."""
        reader = self._open()
        entries: dict[str, Any] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        for path, stored in _leaves(reader.metadata.tree, ()):
            name = tensor_name(stored) or ".".join(map(str, path))
            paths[name] = path
            tensor = reader.stored(name) if tensor_name(stored) else None
            if tensor is None:
                entries[name] = dcp.BytesStorageMetadata()
                continue
            boxes = [tensor.grid.box(i) for i in range(len(tensor.files))]
            boxes = boxes or [
                ((0,) * len(tensor.shape), tensor.shape)
            ]  # torch asks for a chunk of an empty tensor
            chunks = [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
            properties = dcp.TensorProperties(dtype=tensor.dtype)
            entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return dcp.Metadata(entries, planner_data=paths, storage_data={}, storage_meta=dcp.StorageMeta())

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Open the checkpoint."""
        self._open()

    def _open(self) -> Reader:
        if self._reader is None:
            self._reader = open_checkpoint(resolve_path(self.path))
        return self._reader

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; a chunk is read once for all that is asked of it."""
        reader = self._open()
        values = {".".join(map(str, path)): v for path, v in _leaves(reader.metadata.tree, ())}
        kept: tuple[Any, Any] = (None, None)
        try:
            for item in sorted(
                plan.items, key=lambda i: (i.storage_index.fqn, tuple(i.storage_index.offset or ()))
            ):
                name = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(decode(values[name], str), data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                    continue
                stored, target = reader.stored(name), planner.resolve_tensor(item).detach()
                if stored is None or not target.numel():
                    continue
                offset = tuple(item.storage_index.offset or (0,) * len(stored.shape))
                if kept[0] != (name, offset):
                    kept = (name, offset), _cell(reader, name, offset)
                where: Any = tuple(
                    slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target.copy_(kept[1][where])
                planner.commit_tensor(item, target)
        finally:
            reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the path of a directory, rather than an address."""
        return "://" not in str(checkpoint_id)


def _cell(reader: Reader, name: str, offset: tuple[int, ...]) -> torch.Tensor:
    """A whole cell."""
    stored = reader.stored(name)
    if stored is None:
        raise KeyError(name)
    cell = next(i for i in range(len(stored.files)) if stored.grid.box(i)[0] == offset)
    shape = stored.grid.box(cell)[1]
    bits = empty_bits(shape, stored.dtype.itemsize)
    start = (0,) * len(shape)
    reader.read_part(name, Part(cell, start, start, shape), bits, counts=False)
    return tensor_of(bits, stored.dtype)


def _leaves(stored: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Tensors and plain values by path; a list is a value unless it has tensors or dicts, as torch sees it."""
    if tensor_name(stored) is not None:
        yield path, stored
        return
    items = children(stored)
    if isinstance(stored, list) and not any(isinstance(v, dict) for v in stored):
        items = None
    if items is None or (not items and path):
        yield path, stored
        return
    for key, value in items.items():
        yield from _leaves(value, (*path, key))
