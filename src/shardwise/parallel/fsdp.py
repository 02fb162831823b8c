"""Where torch keeps what its first FSDP needs for tensor-parallel modules, which is not supported."""

from __future__ import annotations

from typing import Any

__all__ = ["DTensorExtensions"]


class DTensorExtensions:
    """What torch's `FullyShardedDataParallel` constructs for a mesh that is part of a larger one."""

    def __init__(self, device_handle: Any = None) -> None:
        raise NotImplementedError(
            "FullyShardedDataParallel got a mesh that is an axis of a larger mesh.\n"
            "  why: Its flat parameters cannot hold DTensors of shardwise, and torch no longer develops it.\n"
            "  fix: from torch.distributed.fsdp import fully_shard; fully_shard(module, mesh=mesh)"
        )
