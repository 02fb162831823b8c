"""Debugging: counts of collectives, and pictures of layouts."""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.picture import picture, visualize_sharding

__all__ = ["CommDebugMode", "picture", "visualize_sharding"]
