"""Reading parts of the tensors in a safetensors file, which is mapped into memory: only what is used is read.

The format: the length of the header as a little-endian integer of 8 bytes, the header in JSON, the data of all tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import LayoutError

__all__ = ["open_safetensors"]

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_LENGTH = 8


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; their memory is the file, so that reading a slice of one reads only that part."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < _LENGTH:
            raise _invalid(path, f"it has {size} bytes")
        # private: torch wants memory that it could write to
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(mapped[:_LENGTH], "little")
    if length > size - _LENGTH:
        raise _invalid(path, f"its header would have {length} bytes")
    try:
        header = json.loads(mapped[_LENGTH : _LENGTH + length])
    except ValueError as error:
        raise _invalid(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not an object")
    data = torch.frombuffer(mapped, dtype=torch.uint8)[_LENGTH + length :]
    return {name: _tensor(path, name, e, data) for name, e in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: Any, data: Tensor) -> Tensor:
    """One tensor as a view of the file."""
    try:
        dtype, shape = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
        start, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(path, f"the entry of {name} is {entry!r}") from error
    nbytes = math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or not 0 <= start <= end <= data.numel() or end - start != nbytes:
        raise _invalid(path, f"the entry of {name} is {entry!r}, and the data has {data.numel()} bytes")
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    block = data[start:end]
    if block.storage_offset() % dtype.itemsize:
        block = block.clone()
    return block.view(dtype).view(shape)


def _invalid(path: Path, why: str) -> LayoutError:
    return LayoutError(
        f"{path.name} is not a safetensors file.",
        why=f"It cannot be read: {why}.",
        fix="Write it with safetensors.torch.save_file, or pass a state dict.",
    )
