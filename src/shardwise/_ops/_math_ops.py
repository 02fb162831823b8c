"""Where torch keeps the strategies of reductions and norms."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._math_ops",
    "NormReduction Reduction _NormPartial common_reduction_strategy linear_reduction_strategy "
    "map_placements_after_reduction vector_norm_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
