"""Where torch keeps the rules of pointwise ops."""

from shardwise._absent import absent

__all__ = ["register_inductor_prims"]


def register_inductor_prims() -> None:
    """Do nothing: ops of inductor are pointwise by their schemas, here as elsewhere."""


__getattr__ = absent(
    "_ops._pointwise_ops",
    "linear_pointwise_ops pointwise_ops pointwise_strategy single_mesh_dim_linear_pointwise_strategy "
    "single_mesh_dim_pointwise_strategy",
    why="Ops are pointwise by the table in `shardwise.rules` or by their tag, so there is no list of them.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
