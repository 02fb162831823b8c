"""Parallelism of modules: the data-parallel engine, styles, plans and losses."""

from shardwise.api.linear_cross_entropy import linear_cross_entropy
from shardwise.api.owner_optimizer import OwnerOptimizer
from shardwise.parallel.agreement import check_ranks
from shardwise.parallel.data.api import fully_shard, replicate, share_comm_ctx
from shardwise.parallel.data.explain import Explanation, explain
from shardwise.parallel.data.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from shardwise.parallel.data.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwise.parallel.data.zero import zero
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.parallelize import parallelize_module
from shardwise.parallel.plan import PlanError
from shardwise.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OwnerOptimizer",
    "ParallelStyle",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "check_ranks",
    "explain",
    "fully_shard",
    "linear_cross_entropy",
    "loss_parallel",
    "parallelize_module",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "zero",
]
