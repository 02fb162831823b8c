"""Where torch keeps the propagation of shardings; here routes and rules decide, in `shardwise.dispatch`."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_sharding_prop",
    "LocalLRUCache ShardingPropagator",
    why="Layouts of results follow from rules, so there is no object that propagates shardings.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
