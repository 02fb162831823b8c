"""Debugging: counts of collectives, pictures of layouts, and checks that ranks agree."""

from shardwise._absent import absent
from shardwise.debug.comm_mode import CommDebugMode
from shardwise.debug.divergence import DivergenceError
from shardwise.debug.picture import picture, visualize_sharding
from shardwise.debug.sanitize import sanitize
from shardwise.plan.settings import forget_decisions

_clear_sharding_prop_cache = _clear_python_sharding_prop_cache = _clear_fast_path_sharding_prop_cache = (
    forget_decisions
)
"""Torch's names for forgetting how ops run."""

__all__ = ["CommDebugMode", "DivergenceError", "picture", "sanitize", "visualize_sharding"]

__getattr__ = absent(
    "debug",
    "_get_fast_path_sharding_prop_cache_stats _get_python_sharding_prop_cache_info",
    why="The cached path of an op counts nothing, because counting costs time on every call.",
    fix="shardwise.debug.CommDebugMode counts collectives.",
)
