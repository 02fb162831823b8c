"""Where torch keeps the strategies of random ops."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._random_ops",
    "_inplace_random_ops _random_inplace_single_dim_strategy multinomial_single_dim_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
