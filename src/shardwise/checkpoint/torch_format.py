"""Checkpoints that torch.distributed.checkpoint has written: their metadata is a pickle, of which nothing is executed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.bits import bits_of
from shardwise.checkpoint.errors import CheckpointStateError
from shardwise.checkpoint.metadata import Metadata, StoredTensor, corrupt, grid_of_chunks
from shardwise.checkpoint.read import Part, Reader
from shardwise.checkpoint.values import TAG, encode

__all__ = ["TORCH_METADATA", "TorchReader", "tree_of"]

TORCH_METADATA = ".metadata"
_ANY_FAILURE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError,
    MemoryError, RecursionError, RuntimeError, ImportError,
)  # fmt: skip


class _Record:
    """What stands for an object of the pickle: its arguments and its state, and no behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


_DCP = "torch.distributed.checkpoint"
_KNOWN: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    **{
        (f"{_DCP}.metadata", name): _Record
        for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): _Record for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")},
    **{("pathlib._local", name): _Record for name in ("PosixPath", "WindowsPath")},
}  # fmt: skip
"""What the names in a pickle of metadata stand for; there are no others."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no metadata has")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to data outside")


@dataclass
class TorchReader(Reader):
    """The tensors of a checkpoint of torch. Chunks are read as a whole, as torch stores them; the last one is kept."""

    chunks: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = field(default_factory=dict)
    _last: tuple[Any, Tensor] | None = None

    @classmethod
    def of(cls, path: Path) -> TorchReader:
        """The reader of the checkpoint in a directory."""
        try:
            found = _Unpickler(io.BytesIO((path / TORCH_METADATA).read_bytes())).load()
            return cls._of(path, found)
        except CheckpointStateError as error:
            raise corrupt(path, f"it has a value that is neither plain nor a tensor: {error.what}") from error
        except OSError as error:
            raise corrupt(path, f"it cannot be read: {error}") from error
        except _ANY_FAILURE as error:
            raise corrupt(
                path, f"{TORCH_METADATA} is not valid: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    @classmethod
    def _of(cls, path: Path, found: Any) -> TorchReader:
        if not isinstance(found, _Metadata):
            raise ValueError(f"a {type(found).__name__} instead of the metadata")
        out = cls(path, Metadata({}, {}, {}, (), None))
        for index, info in found.storage_data.items():
            offset = None if index.state.get("offset") is None else tuple(int(n) for n in index.offset)
            name = str(info.relative_path)
            if (
                Path(name).is_absolute()
                or ".." in Path(name).parts
                or info.state.get("transform_descriptors")
            ):
                raise ValueError(f"data in {name!r} that cannot be read")
            out.chunks[str(index.fqn), offset] = name, int(info.offset), int(info.length)
        tensors, values = {}, {}
        for name, entry in found.state_dict_metadata.items():
            if isinstance(entry, _Tensor):
                tensors[str(name)] = _stored(entry)
                values[name] = {TAG: "tensor", "name": name}
            else:
                values[name] = encode(out._load((str(name), None)), str(name), _no_tensor)
        paths = found.planner_data if isinstance(found.planner_data, Mapping) else {}
        tree = tree_of({tuple(paths.get(name, (name,))): value for name, value in values.items()})
        out.metadata = Metadata(tree, tensors, {}, (), None)
        return out

    def _load(self, key: tuple[str, tuple[int, ...] | None]) -> Any:
        """The value of a chunk; torch.load refuses whatever is not a tensor or plain."""
        if key not in self.chunks:
            raise corrupt(self.path, f"{TORCH_METADATA} does not say where {key[0]} at {key[1]} is")
        file, offset, length = self.chunks[key]
        try:
            with (self.path / file).open("rb") as stream:
                stream.seek(offset)
                data = stream.read(length)
            self.data_bytes += len(data)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as error:
            raise corrupt(self.path, f"{file} cannot be read: {error}") from error
        except _ANY_FAILURE as error:
            raise corrupt(self.path, f"{key[0]} in {file} cannot be read: {str(error)[:200]}") from error

    def read_part(self, name: str, part: Part, out: NDArray[Any], counts: bool) -> None:
        """Read a part of a chunk into an array of its shape."""
        stored = self.metadata.tensors[name]
        offset, shape = stored.grid.box(part.cell)
        if self._last is None or self._last[0] != (name, offset):
            value = self._load((name, offset))
            if not isinstance(value, Tensor) or value.dtype != stored.dtype or tuple(value.shape) != shape:
                raise corrupt(
                    self.path, f"{name} at {offset} is not a tensor of {stored.dtype}, shape {shape}"
                )
            self._last = (name, offset), value
        box: Any = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
        out[...] = bits_of(self._last[1])[(*box, ...)]


def _no_tensor(tensor: Tensor, path: str) -> str:
    raise ValueError(f"{path} is stored as a value but has a tensor")


def _stored(entry: Any) -> StoredTensor:
    state = entry.properties.state
    dtype, shape = (
        (state[0] if isinstance(state, tuple) else state["dtype"]),
        tuple(int(n) for n in entry.size),
    )
    chunks = [(tuple(int(n) for n in c.offsets), tuple(int(n) for n in c.sizes)) for c in entry.chunks]
    if not isinstance(dtype, torch.dtype) or any(n < 0 for n in shape):
        raise ValueError(f"a tensor of {dtype}, shape {shape}")
    grid, _ = grid_of_chunks(shape, chunks)
    return StoredTensor(dtype, shape, grid, [0] * len(grid.owners))


def tree_of(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """The stored tree of values by path; numbers from 0 on are the indices of a list.

    >>> tree_of({("a", "b"): 1, ("a", "c", 0): 2, ("a", "c", 1): 3})
    {'a': {'b': 1, 'c': [2, 3]}}
    """
    groups: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (first, *rest), value in values.items():
        groups.setdefault(first, {})[tuple(rest)] = value
    items = {key: group[()] if () in group else tree_of(group) for key, group in groups.items()}
    if items and all(type(k) is int for k in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in range(len(items))]
    if all(type(k) is str for k in items) and TAG not in items:
        return items
    return {TAG: "map", "items": [[k, v] for k, v in items.items()]}
