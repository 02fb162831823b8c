"""Debugging: counts of collectives, and pictures of layouts."""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.picture import picture, visualize_sharding
from shardwise.plan.settings import forget_decisions

_clear_sharding_prop_cache = forget_decisions
"""Torch's name for forgetting how ops run."""

__all__ = ["CommDebugMode", "picture", "visualize_sharding"]
