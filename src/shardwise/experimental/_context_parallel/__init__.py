"""Where torch keeps context parallelism."""

from shardwise.experimental._context_parallel._attention import context_parallel

__all__ = ["context_parallel"]
