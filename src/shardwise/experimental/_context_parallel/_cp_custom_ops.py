"""Where torch keeps the op that gathers keys and values for flex attention."""

from shardwise.experimental._context_parallel._attention import flex_cp_allgather

__all__ = ["flex_cp_allgather"]
