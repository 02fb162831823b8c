"""Where torch keeps the propagation of shardings through decompositions."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_decompositions",
    "DecompShardingStrategy _extract_input_specs _infer_schema_info_from_op PlacementTrackingMode",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
