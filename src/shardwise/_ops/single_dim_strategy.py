"""Where torch keeps strategies for one axis of a mesh."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops.single_dim_strategy",
    "_build_output_specs _dijkstra_expand_single_dim_strategy_to_mesh "
    "_expand_single_dim_strategy_to_mesh _ExpandedSingleDimStrategyFunc "
    "_fill_single_dim_strategy_placeholders _get_neighbor_placements _get_num_tensor_inputs "
    "_get_overload_packet _get_packet_overload _get_unique_placements _has_default_value "
    "_insert_single_dim_replication_strategy _is_sharding _normalize_schema_type "
    "_op_namespace_and_base_name _PlacementT _PQEntry _PreparedSingleDimStrategy "
    "register_single_dim_strategy _resolve_foreach_elementwise_overload _schema_args_match "
    "_ShardingPlaceholder _ShardingPlaceholderT _SingleDimStrategyFunc _SingleDimStrategyInfo "
    "_StrategyTypeT",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
