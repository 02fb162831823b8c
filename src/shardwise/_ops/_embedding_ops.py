"""Where torch keeps the placement of a lookup in a split table."""

from shardwise._absent import absent
from shardwise.layout import MaskPartial as _MaskPartial

__all__ = ["_MaskPartial"]

__getattr__ = absent(
    "_ops._embedding_ops",
    "embedding_dense_backward_strategy embedding_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
