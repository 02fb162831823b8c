"""Where torch keeps the rules of pointwise ops."""

from shardwise._absent import absent

__all__ = ["register_inductor_prims"]


def register_inductor_prims() -> None:
    """Do nothing: ops of inductor are pointwise by their schemas, here as elsewhere."""


__getattr__ = absent(
    "_ops._pointwise_ops",
    "_ALL_PARTIAL_BINARY_PRESERVING_RULES all_partial_preserving_binary_ops "
    "_ALL_PARTIAL_PRESERVING_RULES all_partial_preserving_unary_ops binary_additive_ops "
    "_BINARY_ADDITIVE_RULES binary_div_ops binary_mul_ops _common_pointwise_single_dim_strategy "
    "_DIV_RULES _extra_pointwise_ops _FUSED_OP_SCALAR_IDX _get_pointwise_ops_from_tag _is_list_op "
    "linear_pointwise_ops _MONOTONE_BINARY_BASE_RULES _MONOTONE_MAX_PRESERVING_BINARY_BASE_RULES "
    "_MONOTONE_MIN_PRESERVING_BINARY_BASE_RULES monotonic_binary_ops "
    "monotonic_max_preserving_binary_ops monotonic_min_preserving_binary_ops _MUL_RULES neg_ops "
    "_NEG_RULES _NON_DECREASING_RULES non_decreasing_unary_ops _NON_INCREASING_RULES "
    "non_increasing_unary_ops pointwise_ops pointwise_strategy _POSITIVE_DOMAIN_NON_INCREASING_RULES "
    "_register_single_dim_pointwise scalar_linear_ops single_mesh_dim_linear_pointwise_strategy "
    "single_mesh_dim_pointwise_strategy _specially_registered_ops unary_linear_ops "
    "_UNARY_LINEAR_RULES _XLOG1PY_RULES",
    why="Ops are pointwise by the table in `shardwise.rules` or by their tag, so there is no list of them.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
