"""Parallelism of modules: styles, plans and losses."""

from shardwise.parallel.linear_cross_entropy import linear_cross_entropy
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
    "ColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "linear_cross_entropy",
    "loss_parallel",
    "parallelize_module",
]
