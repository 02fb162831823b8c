"""The safetensors format: its headers, and parts of tensors in a file, which is mapped into memory: only what is used is read.

The format: the length of the header as a little-endian integer of 8 bytes, the header in JSON, the data of all tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.layout import LayoutError

__all__ = [
    "Entry",
    "dtype_name",
    "dtype_named",
    "has_name",
    "header_bytes",
    "open_safetensors",
    "parse_header",
    "read_header",
]

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_LENGTH = 8


_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {
    torch.complex128: "C128", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_DTYPES |= {name: dtype for dtype, name in _NAMES.items()}


class Entry(NamedTuple):
    """A tensor of a file: its dtype, its shape, and where its data begins and ends in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a header.

    >>> dtype_name(torch.bfloat16)
    'BF16'
    """
    if dtype not in _NAMES:
        raise LayoutError(
            f"{dtype} cannot be written to a safetensors file.",
            why="The format has no name for it.",
            fix="Write x.view(torch.uint8), or convert it.",
        )
    return _NAMES[dtype]


def has_name(dtype: torch.dtype) -> bool:
    """Whether headers have a name for a dtype.

    >>> has_name(torch.bfloat16), has_name(torch.complex32)
    (True, False)
    """
    return dtype in _NAMES


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name in a header; None for unknown ones."""
    return _DTYPES.get(name)


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """The beginning of a file with these tensors, one after the other.

    >>> header_bytes([("w", torch.float32, (2, 3))], {})[8:]
    b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}       '
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)  # the data is aligned
    return len(text).to_bytes(_LENGTH, "little") + text


def read_header(path: Path) -> bytes:
    """The beginning of a file up to its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH)
        if len(first) < _LENGTH:
            raise _invalid(path, f"it has {size} bytes")
        length = int.from_bytes(first, "little")
        if length > size - _LENGTH:
            raise _invalid(path, f"its header would have {length} bytes")
        return first + file.read(length)


def parse_header(path: Path, header: bytes) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The tensors of a file by name, and the metadata in its header."""
    try:
        found = json.loads(header[_LENGTH:])
    except (ValueError, RecursionError) as error:
        raise _invalid(path, "its header is not JSON") from error
    if not isinstance(found, dict):
        raise _invalid(path, "its header is not an object")
    metadata = found.pop("__metadata__", {})
    size = path.stat().st_size
    entries = {name: _entry(path, name, e, len(header), size) for name, e in found.items()}
    return entries, metadata if isinstance(metadata, dict) else {}


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> Entry:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        start, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _invalid(path, f"the entry of {name} is {str(entry)[:200]}") from error
    nbytes = math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or not 0 <= start <= end <= size - data or end - start != nbytes:
        raise _invalid(
            path, f"the entry of {name} is {str(entry)[:200]}, and the data has {size - data} bytes"
        )
    return Entry(dtype, shape, data + start, data + end)


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; their memory is the file, so that reading a slice of one reads only that part."""
    entries, _ = parse_header(path, read_header(path))
    with path.open("rb") as file:
        # private: torch wants memory that it could write to
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    return {name: _tensor(entry, data) for name, entry in entries.items()}


def _tensor(entry: Entry, data: Tensor) -> Tensor:
    """One tensor as a view of the file."""
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    block = data[entry.start : entry.end]
    if block.storage_offset() % entry.dtype.itemsize:
        block = block.clone()
    return block.view(entry.dtype).view(entry.shape)


def _invalid(path: Path, why: str) -> LayoutError:
    return LayoutError(
        f"{path.name} is not a safetensors file.",
        why=f"It cannot be read: {why}.",
        fix="Write it with safetensors.torch.save_file, or pass a state dict.",
    )
