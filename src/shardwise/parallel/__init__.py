"""Module parallelism; its names come here as they are delivered."""

from shardwise.parallel.loss import loss_parallel

__all__ = ["loss_parallel"]
