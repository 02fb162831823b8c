"""Writing the cells of a rank into its data file, and making a checkpoint of the files of all ranks."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.aside import remove_left_files
from shardwise.checkpoint.checksum import box_sum
from shardwise.checkpoint.errors import CheckpointWriteError
from shardwise.checkpoint.exchange import Report
from shardwise.checkpoint.metadata import METADATA, metadata_bytes, old_path, write_synced
from shardwise.checkpoint.safetensors_file import header_bytes
from shardwise.checkpoint.save_plan import Item, SavePlan, block_on, coord_on, positions

__all__ = [
    "cell_of",
    "commit",
    "file_name",
    "sync_directory",
    "write_errors",
    "write_file",
    "write_rank",
]

Cells = Callable[[Item], NDArray[Any]]


def file_name(rank: int) -> str:
    """The name of a rank's data file."""
    return f"data-{rank:05d}.safetensors"


def cell_of(tensor: Tensor, item: Item, rank: int) -> Tensor:
    """The part of a tensor's block that an item is."""
    block = block_on(tensor, rank)
    coord = coord_on(tensor, rank)
    at: Sequence[int] = item.offset
    if hasattr(tensor, "sharding") and coord is not None:
        at = positions(tensor.sharding, coord, item.offset)
    for d, (begin, size) in enumerate(zip(at, item.shape, strict=True)):
        if size != block.shape[d]:
            block = block.narrow(d, begin, size)
    return block


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into errors of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(
            f"The checkpoint {path} was not written: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}.",
            why="A checkpoint exists completely or not at all; what was at that path before is unchanged.",
            fix="Make room or give access, and save again.",
        ) from error


def write_rank(plan: SavePlan, rank: int, path: Path, cells: Cells) -> Report:
    """Write the cells of a rank into its file in `path`; report the file's name, size and the checksum of its header."""
    items = plan.items_of(rank)
    path.mkdir(parents=True, exist_ok=True)
    if not items:
        return {"file": None}
    names = [i.name_in_file(len(plan.writers[i.name])) for i in items]
    entries = [(name, plan.stored[i.name].dtype, i.shape) for name, i in zip(names, items, strict=True)]
    return write_file(path / file_name(rank), entries, (cells(item) for item in items))


def write_file(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    data: Iterable[NDArray[Any]],
) -> Report:
    """Write a data file with these tensors, given by name, dtype and shape, and the checksums of their bits."""
    names = [name for name, *_ in entries]
    if len(set(names)) < len(names):
        name = next(n for n in names if names.count(n) > 1)
        raise CheckpointWriteError(
            f"Two tensors would be stored as {name!r}.",
            why="A part of a tensor is stored under its name and its indices, which another tensor has as its name.",
            fix="Rename one of them.",
        )
    sums = [0] * len(names)
    with path.open("wb", buffering=0) as file:
        size = _write(file.fileno(), header_bytes(entries, _sums_text(sums)))
        for number, cell in enumerate(data):
            bits = np.asarray(cell, order="C")
            sums[number] = box_sum(bits, [0] * bits.ndim)
            size += _write(file.fileno(), bits)
        header = header_bytes(entries, _sums_text(sums))  # of the same length
        os.pwrite(file.fileno(), header, 0)
        os.fsync(file.fileno())
    return {"file": path.name, "bytes": size, "header": hashlib.sha256(header).hexdigest()}


def _sums_text(sums: Sequence[int]) -> dict[str, str]:
    """The checksums of the cells of a file, in the order of its header, in text of fixed length."""
    return {"format": "pt", "sums": "".join(f"{s:08x}" for s in sums)}


def _write(descriptor: int, data: Any) -> int:
    """Write all of some bytes."""
    left = (
        memoryview(data).cast("B")
        if not (isinstance(data, np.ndarray) and data.size == 0)
        else memoryview(b"")
    )
    total = left.nbytes
    while left.nbytes:
        left = left[os.write(descriptor, left[: 1 << 30]) :]
    return total


def commit(path: Path, aside: Path, content: dict[str, Any], reports: Sequence[Report]) -> None:
    """Make the files in `aside` the checkpoint at `path`, in one step."""
    numbers = {rank: i for i, rank in enumerate(r for r, f in enumerate(reports) if f["file"])}
    files = [{"name": f["file"], "bytes": f["bytes"], "header": f["header"]} for f in reports if f["file"]]
    tensors = {
        name: {**t, "files": [numbers[rank] for rank in t["files"]]} for name, t in content["tensors"].items()
    }
    known = {f["name"] for f in files}
    for found in aside.iterdir():  # of a save that was interrupted
        if found.name not in known:
            found.unlink()
    write_synced(aside / METADATA, metadata_bytes({**content, "tensors": tensors, "files": files}))
    sync_directory(aside)
    before = old_path(path)
    if path.exists():
        if (path / METADATA).exists() or not any(path.iterdir()):
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        else:
            raise FileExistsError(17, "the directory has other files", str(path))
    aside.rename(path)
    sync_directory(path.parent)
    shutil.rmtree(before, ignore_errors=True)
    remove_left_files(path, keep_unknown=False)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
