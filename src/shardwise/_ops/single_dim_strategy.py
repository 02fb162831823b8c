"""Where torch keeps strategies for one axis of a mesh."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops.single_dim_strategy",
    "_ShardingPlaceholder _SingleDimStrategyInfo _expand_single_dim_strategy_to_mesh "
    "_fill_single_dim_strategy_placeholders _get_num_tensor_inputs _get_unique_placements "
    "_insert_single_dim_replication_strategy register_single_dim_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
