"""Reading boxes of the tensors in a checkpoint: exactly their bytes, with checksums."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.checksum import MODULUS, box_sum
from shardwise.checkpoint.metadata import Metadata, StoredTensor, corrupt, read_metadata
from shardwise.checkpoint.safetensors_file import Entry, parse_header, read_header
from shardwise.checkpoint.save_plan import Item
from shardwise.layout import LayoutError

__all__ = ["Part", "Partial", "Reader", "parts_of"]

_OPEN_FILES = 32
_SMALL_RUN = 4096
"""Runs of fewer bytes are copied from mapped memory; a system call for each would cost more."""


class Part(NamedTuple):
    """The part of a cell that a block has: where it begins in the cell and in the block, and its shape."""

    cell: int
    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]


def parts_of(stored: StoredTensor, held: Sequence[Sequence[int]]) -> list[Part]:
    """The parts of cells that make up a block with these indices of each dim."""
    along = [_pieces(cuts, h) for cuts, h in zip(stored.grid.cuts, held, strict=True)]
    counts = stored.grid.shape
    out = []
    for pieces in itertools.product(*along):
        cell = 0
        for (index, *_), count in zip(pieces, counts, strict=True):
            cell = cell * count + index
        _, start, local, shape = zip(*pieces, strict=True) if pieces else ((), (), (), ())
        out.append(Part(cell, start, local, shape))
    return out


def _pieces(cuts: NDArray[np.int64], held: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Along one dim: the cell, the start in the cell, the start in the block, and the length of each piece."""
    ends, out = cuts.tolist(), []
    for first, position, length in _runs(held):
        while length:
            cell = bisect.bisect_right(ends, first) - 1
            count = min(length, ends[cell + 1] - first)
            out.append((cell, first - ends[cell], position, count))
            first, position, length = first + count, position + count, length - count
    return out


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Consecutive indices as (first index, position of the first, number)."""
    if isinstance(indices, range):
        if len(indices):
            yield indices.start, 0, len(indices)
        return
    at = np.asarray(indices)
    begins = np.flatnonzero(np.diff(at, prepend=at[:1] - 2) != 1)
    for a, b in itertools.pairwise([*begins.tolist(), len(at)]):
        yield int(at[a]), a, b - a


class Partial(NamedTuple):
    """The share of a cell that was read, in the cell's checksum, and that checksum."""

    found: int
    expected: int


@dataclass
class Reader:
    """The tensors of a checkpoint. It counts the bytes of data that it reads, and of headers."""

    path: Path
    metadata: Metadata
    data_bytes: int = 0
    header_bytes: int = 0
    partial: dict[tuple[str, int], Partial] = field(default_factory=dict)
    _headers: dict[int, tuple[dict[str, Entry], dict[str, int]]] = field(default_factory=dict)
    _open: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, path: Path) -> Reader:
        """The reader of the checkpoint in a directory."""
        return cls(path, read_metadata(path))

    def stored(self, name: str) -> StoredTensor | None:
        """A tensor by one of its names."""
        return self.metadata.tensors.get(self.metadata.aliases.get(name, name))

    def read_part(self, name: str, part: Part, out: NDArray[Any], counts: bool) -> None:
        """Read a part of a cell into an array of its shape.

        Args:
            counts: this rank answers for the checksum of this part; false where another rank reads the same.
        """
        asked, name = name, self.metadata.aliases.get(name, name)
        stored = self.metadata.tensors[name]
        offset, shape = stored.grid.box(part.cell)
        entry, expected = self._entry(name, stored, part.cell, offset, shape)
        words = out.shape[len(shape) :]  # elements of 16 bytes are two words
        begin = (*part.start, *[0] * len(words))
        self._read(stored.files[part.cell], entry, (*shape, *words), begin, out)
        self.data_bytes += out.nbytes
        if part.shape == shape:
            if box_sum(out, begin) != expected:
                raise self._damaged(name, stored.files[part.cell], offset, shape)
        elif counts:
            found = self.partial.get((asked, part.cell), Partial(0, 0)).found
            self.partial[asked, part.cell] = Partial((found + box_sum(out, begin)) % MODULUS, expected)

    def _damaged(self, name: str, file: int, offset: Sequence[int], shape: Sequence[int]) -> Exception:
        where = ", ".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
        return corrupt(
            self.path,
            f"the values of {name}[{where}] in {self.metadata.files[file].name} do not match their checksum",
        )

    def damaged_cell(self, name: str, cell: int) -> Exception:
        """The error for a cell whose parts do not add up to its checksum."""
        name = self.metadata.aliases.get(name, name)
        stored = self.metadata.tensors[name]
        return self._damaged(name, stored.files[cell], *stored.grid.box(cell))

    def _entry(
        self, name: str, stored: StoredTensor, cell: int, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[Entry, int]:
        """Where a cell is in its file, and its checksum."""
        file = stored.files[cell]
        entries, sums = self._header(file)
        key = Item(name, cell, offset, shape).name_in_file(len(stored.files))
        entry = entries.get(key)
        if entry is None or entry.dtype != stored.dtype or entry.shape != shape:
            raise corrupt(
                self.path, f"{self.metadata.files[file].name} has no {key} of {stored.dtype}, shape {shape}"
            )
        return entry, sums[key]

    def _header(self, file: int) -> tuple[dict[str, Entry], dict[str, int]]:
        if file not in self._headers:
            known = self.metadata.files[file]
            path = self.path / known.name
            try:
                size = path.stat().st_size
                if size != known.bytes:
                    raise corrupt(self.path, f"{known.name} has {size} bytes, not {known.bytes}")
                data = read_header(path)
                if hashlib.sha256(data).hexdigest() != known.header:
                    raise corrupt(self.path, f"the header of {known.name} does not match its checksum")
                entries, metadata = parse_header(path, data)
            except FileNotFoundError as error:
                raise corrupt(self.path, f"{known.name} is missing") from error
            except (OSError, LayoutError) as error:
                raise corrupt(self.path, f"{known.name} cannot be read: {error}") from error
            self.header_bytes += len(data)
            self._headers[file] = entries, self._sums(known.name, entries, metadata.get("sums"))
        return self._headers[file]

    def _sums(self, file: str, entries: dict[str, Entry], text: Any) -> dict[str, int]:
        try:
            return {key: int(text[8 * i : 8 * i + 8], 16) for i, key in enumerate(entries)}
        except (TypeError, ValueError) as error:
            raise corrupt(self.path, f"the header of {file} has no checksums") from error

    def _read(
        self, file: int, entry: Entry, shape: tuple[int, ...], start: tuple[int, ...], out: NDArray[Any]
    ) -> None:
        """Read a box of an array of this shape in a file."""
        if out.size == 0:
            return
        size = out.itemsize
        strides = [size * math.prod(shape[d + 1 :]) for d in range(len(shape))]
        tail = len(shape)  # dims from here on are one run of bytes
        while tail and (tail == len(shape) or out.shape[tail] == shape[tail]):
            tail -= 1
        run = size * math.prod(out.shape[tail:])
        first = entry.start + sum(a * b for a, b in zip(start, strides, strict=True))
        descriptor = self._descriptor(file)
        name = self.metadata.files[file].name
        if run < _SMALL_RUN and tail:
            page = first % mmap.ALLOCATIONGRANULARITY
            end = first + sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True)) + size
            with mmap.mmap(
                descriptor, end - first + page, access=mmap.ACCESS_READ, offset=first - page
            ) as mapped:
                source = np.ndarray(out.shape, out.dtype, mapped, page, strides)
                np.copyto(out, source)
                del source
            return
        for index in itertools.product(*map(range, out.shape[:tail])):
            at = first + sum(i * s for i, s in zip(index, strides[:tail], strict=True))
            where: Any = (*index, ...)
            target = out[where]
            direct = (
                target
                if target.flags.c_contiguous and target.flags.writeable
                else np.empty_like(target, order="C")
            )
            try:
                _read_exactly(descriptor, direct, at)
            except OSError as error:
                raise corrupt(self.path, f"{name} cannot be read: {error}") from error
            if direct is not target:
                out[where] = direct

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        known = self.metadata.files[file].name
        try:
            self._open[file] = os.open(self.path / known, os.O_RDONLY)
        except OSError as error:
            raise corrupt(self.path, f"{known} cannot be read: {error}") from error
        return self._open[file]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


def _read_exactly(descriptor: int, out: NDArray[Any], at: int) -> None:
    left = memoryview(out.reshape(-1).view(np.uint8)).cast("B")  # type: ignore[arg-type]
    while left.nbytes:
        count = os.preadv(descriptor, [left], at)
        if count == 0:
            raise OSError(5, "it ends too early")
        left, at = left[count:], at + count
