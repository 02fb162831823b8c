"""Fully sharded data parallelism, under the names of `torch.distributed.fsdp`."""

from shardwise.parallel.data import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
