"""Parallelism of modules: losses so far."""

from shardwise.parallel.loss import loss_parallel

__all__ = ["loss_parallel"]
