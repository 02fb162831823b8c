"""Checkpoints: saved from any layout, loaded into any other, complete or not there at all."""

from importlib import import_module as _import_module
from typing import Any as _Any

from shardwise.checkpoint.api import async_save, latest, load, save
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointStateError,
    CheckpointWriteError,
    CorruptCheckpointError,
    NoCheckpointError,
)
from shardwise.checkpoint.export import export
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.staging import release_memory

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointStateError",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "NoCheckpointError",
    "SaveHandle",
    "StorageReader",
    "StorageWriter",
    "async_save",
    "export",
    "latest",
    "load",
    "release_memory",
    "save",
]


def __getattr__(name: str) -> _Any:
    """The classes for torch.distributed.checkpoint, which is imported when they are first asked for."""
    if name in ("StorageReader", "StorageWriter"):
        return getattr(_import_module("shardwise.checkpoint.torch_storage"), name)
    raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
