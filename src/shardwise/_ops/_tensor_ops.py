"""Where torch keeps the strategies of ops that move elements."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._tensor_ops",
    "cat_single_dim_strategy cat_strategy gather_strategy index_put_single_dim_strategy "
    "propagate_single_input_strategy replica_only_strategy split_strategy stack_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
