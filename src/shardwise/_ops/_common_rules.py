"""Where torch keeps rules in the notation of einsum."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._common_rules",
    "einop_rule _gen_reshard_suggestions pointwise_rule _replace_char_in_str",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
