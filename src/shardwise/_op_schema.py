"""Where torch keeps the schema of a call and the strategies of an op."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_op_schema",
    "ArgsType KwargsType OpInfo OpSchema OpSpec OpStrategy OutputSharding OutputSpecType "
    "PlacementList PlacementStrategy _pretty_print_spec _rebuild_tensor_from_dtensor_meta "
    "RuntimeSchemaInfo StrategyType TupleStrategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
