"""Debugging: counts of collectives, pictures of layouts, and checks that ranks agree."""

from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.divergence import DivergenceError
from shardwise.debug.picture import picture, visualize_sharding
from shardwise.debug.sanitize import sanitize
from shardwise.plan.settings import forget_decisions

_clear_sharding_prop_cache = forget_decisions
"""Torch's name for forgetting how ops run."""

__all__ = ["CommDebugMode", "DivergenceError", "picture", "sanitize", "visualize_sharding"]
