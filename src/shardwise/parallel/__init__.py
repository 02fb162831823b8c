"""Parallelism of modules: the data-parallel engine and losses so far."""

from shardwise.parallel.data import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    Explanation,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    explain,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
    zero,
)
from shardwise.parallel.loss import loss_parallel

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "explain",
    "fully_shard",
    "loss_parallel",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "zero",
]
