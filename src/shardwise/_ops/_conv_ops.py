"""Where torch keeps the strategies of convolutions."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._conv_ops",
    "_convolution_full_mesh_strategy_filter _supports_last_dim_sharding "
    "convolution_backward_rules convolution_backward_single_dim_strategy convolution_rules "
    "convolution_single_dim_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
