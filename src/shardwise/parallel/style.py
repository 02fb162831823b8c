"""Parallel styles, under the name of torch's module."""

from shardwise._reexports import reexports
from shardwise.parallel.parallel_style import ParallelStyle
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.split_styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

__getattr__ = reexports("parallel.style")
