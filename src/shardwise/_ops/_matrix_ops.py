"""Where torch keeps the strategies of products of matrices and of attention."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._matrix_ops",
    "addmm_single_dim_strategy addmm_strategy baddbmm_single_dim_strategy baddbmm_strategy "
    "bmm_single_dim_strategy bmm_strategy dot_strategy gen_single_dim_einsum_strategies "
    "mm_single_dim_strategy mm_strategy scaled_mm_single_dim_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
