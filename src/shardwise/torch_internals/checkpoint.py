"""What the planners of `torch.distributed.checkpoint` ask a tensor for.

Its modules are imported where they are used: they import torch's DTensor, and whoever asks has them loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["chunk", "write_item"]


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """The metadata of a rectangular part of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(
    fqn: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, shape: torch.Size
) -> Any:
    """The request to write a rectangular part of a tensor of this dtype and shape."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return WriteItem(
        index=MetadataIndex(fqn, torch.Size(offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk(offsets, sizes), properties=TensorProperties(dtype=dtype), size=shape
        ),
    )
