"""Where torch keeps its pictures of shardings."""

from shardwise.debug.picture import visualize_sharding

__all__ = ["visualize_sharding"]
