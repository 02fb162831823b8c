"""`checkpoint.json`: what a checkpoint has, with the checksum of that text before it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from shardwise.checkpoint.grid import Grid
from shardwise.checkpoint.safetensors_file import dtype_named

__all__ = [
    "METADATA",
    "File",
    "Metadata",
    "StoredTensor",
    "checkpoint_path",
    "read_metadata",
    "resolve_path",
    "version_at",
    "write_synced",
]

METADATA = "checkpoint.json"
VERSION = 1
_PREFIX = b'{"sha256":"'
_MIDDLE = b'","content":'
_END = b"}\n"


class File(NamedTuple):
    """A data file: its name, its size, and the checksum of its header."""

    name: str
    bytes: int
    header: str


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        grid: its cells.
        files: the number of the file that has each cell.
        is_plain: it was no DTensor when it was saved, as far as that is known.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    grid: Grid
    files: list[int]
    is_plain: bool = False


@dataclass(frozen=True)
class Metadata:
    """The contents of a checkpoint.

    Attributes:
        tree: the values.
        tensors: the tensors by name.
        aliases: other names of tensors.
        files: the data files.
        random: the position of the random stream.
        version: differs between checkpoints that are saved one after the other at one path.
    """

    tree: Any
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    files: tuple[File, ...]
    random: Mapping[str, int] | None
    version: str = ""


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The directory that a path means, without symbolic links: what takes its place is written beside it."""
    try:
        return Path(path).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte, or links that lead to each other
        raise NoCheckpointError(
            f"There can be no checkpoint at {str(path)!r}: {error}.",
            why="It is not the path of a directory.",
            fix="Pass the path of a directory.",
        ) from error


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def metadata_bytes(content: Mapping[str, Any]) -> bytes:
    """The text of `checkpoint.json`."""
    text = json.dumps({"format": "shardwise", "version": VERSION, **content}, separators=(",", ":")).encode()
    return _PREFIX + hashlib.sha256(text).hexdigest().encode() + _MIDDLE + text + _END


def resolve_path(path: Path) -> Path:
    """The directory of the checkpoint at a path: while it is being replaced, that of the one before."""
    if not os.path.exists(path / METADATA):  # false for paths that cannot be
        before = old_path(path)
        if os.path.exists(before / METADATA):
            return before
    return path


def old_path(path: Path) -> Path:
    """Where a checkpoint is while the one that replaces it takes its place."""
    return path.with_name(f".{path.name}.old")


def read_metadata(path: Path) -> Metadata:
    """Read and check the metadata of the checkpoint in a directory."""
    try:
        data = (path / METADATA).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if any(path.glob("*.safetensors")):
            raise corrupt(path, f"{METADATA} is missing") from error
        raise NoCheckpointError(
            f"There is no checkpoint at {path}.",
            why=f"It has no {METADATA}.",
            fix=f"{offer(path, 'load({!r}), the newest one there')}",
        ) from error
    except OSError as error:
        raise corrupt(path, f"{METADATA} cannot be read: {error}") from error
    text = _checked_text(path, data)
    try:
        return _parse(json.loads(text), hashlib.sha256(text).hexdigest())
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
        IndexError,
    ) as error:
        raise corrupt(path, f"{METADATA} is not valid: {type(error).__name__}: {str(error)[:200]}") from error


def version_at(path: Path) -> str:
    """The version of the checkpoint that is at a path now; empty if there is none that can be read."""
    try:
        return hashlib.sha256(_checked_text(path, (path / METADATA).read_bytes())).hexdigest()
    except (OSError, CorruptCheckpointError):
        return ""


def _checked_text(path: Path, data: bytes) -> bytes:
    """The content of `checkpoint.json`, which matches its checksum."""
    begin = len(_PREFIX) + 64 + len(_MIDDLE)
    text = data[begin : -len(_END)]
    expected = _PREFIX + hashlib.sha256(text).hexdigest().encode() + _MIDDLE
    if data[:begin] != expected or not data.endswith(_END):
        raise corrupt(path, f"{METADATA} does not match its checksum")
    return text


def _parse(found: Any, version: str) -> Metadata:
    if found["format"] != "shardwise" or found["version"] != VERSION:
        raise ValueError(
            f"format {found['format']!r}, version {found['version']!r}, not 'shardwise', {VERSION}"
        )
    files = tuple(File(str(f["name"]), int(f["bytes"]), str(f["header"])) for f in found["files"])
    for file in files:
        if Path(file.name).name != file.name or file.bytes < 0:
            raise ValueError(f"file {file.name!r} of {file.bytes} bytes")
    tensors = {name: _parse_tensor(name, t, len(files)) for name, t in found["tensors"].items()}
    aliases = dict(found["aliases"])
    if any(target not in tensors for target in aliases.values()):
        raise ValueError("an alias of a tensor that is not there")
    random = found["random"]
    if random is not None:
        random = {k: int(random[k]) for k in ("seed", "position", "agreed")}
    return Metadata(found["state"], tensors, aliases, files, random, version)


def _parse_tensor(name: str, found: Any, files: int) -> StoredTensor:
    dtype, shape = dtype_named(found["dtype"]), tuple(int(n) for n in found["shape"])
    cuts = tuple(np.array(c, np.int64) for c in found["cuts"])
    numbers = [int(n) for n in found["files"]]
    if dtype is None or len(cuts) != len(shape) or any(n < 0 for n in shape):
        raise ValueError(f"tensor {name!r} of {found['dtype']!r}, shape {shape}, cut {len(cuts)} times")
    for along, size in zip(cuts, shape, strict=True):
        begins = along[0] == 0 if size else len(along) == 1
        if along.ndim != 1 or not begins or along[-1] != size or (np.diff(along) <= 0).any():
            raise ValueError(f"tensor {name!r} of shape {shape} is cut at {along.tolist()[:8]}")
    if len(numbers) != math.prod(len(c) - 1 for c in cuts) or any(not 0 <= n < files for n in numbers):
        raise ValueError(f"tensor {name!r} has {len(numbers)} cells in files of {files}")
    grid = Grid(cuts, np.empty((len(numbers), 0), np.int64))
    return StoredTensor(dtype, shape, grid, numbers, found.get("plain") is True)


def grid_of_chunks(
    shape: Sequence[int], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[Grid, dict[tuple[int, ...], int]]:
    """The grid whose cells are these chunks, given by offset and shape, and the number of the cell at each offset."""
    if 0 in shape:  # it has no cells
        whole = tuple(np.array([0, size] if size else [0], np.int64) for size in shape)
        return Grid(whole, np.empty((0, 0), np.int64)), {}
    cuts = tuple(
        np.array([*sorted({o[d] for o, _ in chunks}), size], np.int64) for d, size in enumerate(shape)
    )
    grid = Grid(cuts, np.empty((math.prod(len(c) - 1 for c in cuts), 0), np.int64))
    boxes = {grid.box(i)[0]: (i, grid.box(i)[1]) for i in range(len(grid.owners))}
    given = dict(chunks)
    if len(given) != len(chunks) or {o: s for o, (_, s) in boxes.items()} != given:
        raise ValueError(f"a tensor of shape {tuple(shape)} in chunks that are not the cells of a grid")
    return grid, {o: i for o, (i, _) in boxes.items()}


def corrupt(path: Path, why: str) -> CorruptCheckpointError:
    """The error for a damaged checkpoint, which offers the one before it."""
    return CorruptCheckpointError(
        f"The checkpoint {path} is damaged: {why}.",
        why="What is there is not what was written, so nothing of it can be trusted.",
        fix=offer(path, "load({!r}), the one before it") or "Copy it again from where it came.",
    )


def offer(path: Path, form: str) -> str:
    """The form with the newest complete checkpoint beside or in this path, or text that says there is none."""
    inside = complete_in(path)
    number = checkpoint_number(path)
    beside = [p for p in complete_in(path.parent) if p != path]
    if number is not None:
        beside = [p for p in beside if (checkpoint_number(p) or 0) < number] or beside
    found = inside or beside
    return (
        form.format(str(found[-1])) if found else "There is no other checkpoint beside it; give another path."
    )


def checkpoint_number(path: Path) -> int | None:
    """The number at the end of a name, by which checkpoints are ordered.

    >>> checkpoint_number(Path("run/step-00000120")), checkpoint_number(Path("final"))
    (120, None)
    """
    digits = path.name[len(path.name.rstrip("0123456789")) :]
    return int(digits) if digits.isdecimal() and len(digits) < 19 else None


def complete_in(path: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first: by number, or by time where they have none."""
    if not path.is_dir():
        return []
    found = [p for p in path.iterdir() if not p.name.startswith(".") and (p / METADATA).is_file()]

    def age(p: Path) -> tuple[int, float]:
        number = checkpoint_number(p)
        return (number, 0.0) if number is not None else (-1, (p / METADATA).stat().st_mtime)

    return sorted(found, key=age)
