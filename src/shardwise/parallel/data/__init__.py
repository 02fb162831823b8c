"""The data-parallel engine: groups of parameters that move between the layouts they are stored and computed in."""

from shardwise.parallel.agreement import check_ranks
from shardwise.parallel.data.api import fully_shard, replicate, share_comm_ctx
from shardwise.parallel.data.explain import Explanation, explain
from shardwise.parallel.data.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
)
from shardwise.parallel.data.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from shardwise.parallel.data.zero import zero

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "check_ranks",
    "explain",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "zero",
]
