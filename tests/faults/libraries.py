"""The two libraries that a program with an injected fault runs on."""

from __future__ import annotations

from typing import Any

import torch
from tests.faults.injected import Library

import shardwise as sw
import shardwise.fsdp
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["ours", "theirs"]


def ours() -> Library:
    """Shardwise."""
    return Library(
        init_device_mesh=sw.init_device_mesh,
        distribute_tensor=sw.distribute_tensor,
        DTensor=sw.DTensor,
        Shard=sw.Shard,
        Replicate=sw.Replicate,
        rand=sw.rand,
        manual_seed=lambda seed, mesh: sw.manual_seed(seed),
        fully_shard=shardwise.fsdp.fully_shard,
        parallelize_module=parallelize_module,
        ColwiseParallel=ColwiseParallel,
        RowwiseParallel=RowwiseParallel,
    )


def theirs() -> Library:
    """Torch's DTensor and FSDP."""
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    def manual_seed(seed: int, mesh: Any) -> None:
        torch.manual_seed(seed)

    return Library(
        init_device_mesh=init_device_mesh,
        distribute_tensor=tensor.distribute_tensor,
        DTensor=tensor.DTensor,
        Shard=tensor.Shard,
        Replicate=tensor.Replicate,
        rand=tensor.rand,
        manual_seed=manual_seed,
        fully_shard=fully_shard,
        parallelize_module=parallel.parallelize_module,
        ColwiseParallel=parallel.ColwiseParallel,
        RowwiseParallel=parallel.RowwiseParallel,
    )
