"""Looking at what happens: what was sent, and who holds what."""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.picture import picture, visualize_sharding

__all__ = ["CommDebugMode", "picture", "visualize_sharding"]
