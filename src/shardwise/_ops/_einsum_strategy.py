"""Where torch keeps the strategies of contractions."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._einsum_strategy",
    "EinsumDims gen_einsum_strategies",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
