"""What the planners of `torch.distributed.checkpoint` ask a tensor for.

Its modules are imported where they are used: they import torch's DTensor, and whoever asks has them loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

__all__ = ["chunk", "write_item"]


def _module(name: str) -> Any:
    return import_module(f"torch.distributed.checkpoint.{name}")


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """The metadata of a rectangular part of a tensor."""
    return _module("metadata").ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(
    fqn: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, shape: torch.Size
) -> Any:
    """The request to write a rectangular part of a tensor of this dtype and shape."""
    metadata, planner = _module("metadata"), _module("planner")
    return planner.WriteItem(
        index=metadata.MetadataIndex(fqn, torch.Size(offsets)),
        type=planner.WriteItemType.SHARD,
        tensor_data=planner.TensorWriteData(
            chunk=chunk(offsets, sizes), properties=metadata.TensorProperties(dtype=dtype), size=shape
        ),
    )
