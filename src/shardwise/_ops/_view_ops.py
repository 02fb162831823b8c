"""Where torch keeps what the dims of a view are made of."""

from shardwise._absent import absent
from shardwise._ops.dim_maps import dim_maps
from shardwise._ops.dim_specs import (
    Broadcast,
    DimSpec,
    Flatten,
    InputDim,
    NewDim,
    Repeat,
    Singleton,
    Split,
    infer_size,
    view_groups,
)

__all__ = [
    "Broadcast",
    "DimSpec",
    "Flatten",
    "InputDim",
    "NewDim",
    "Repeat",
    "Singleton",
    "Split",
    "dim_maps",
    "infer_size",
    "view_groups",
]

__getattr__ = absent(
    "_ops._view_ops",
    "ClaimedDim dim_atleast_3d dim_flatten dim_movedim dim_pad_left dim_reduction dim_repeat dim_squeeze dim_tile "
    "dim_transpose dim_unsqueeze dim_view_as_real DimMap expand normalize_sizes propagate_shape_and_sharding "
    "register_op_strategy_map Shape _ViewShardingPropagator",
    why="`shardwise.layout.view` regroups the factors of a layout; views are not groups of dims.",
    fix="`dim_maps` and `view_groups` describe views; shardwise.layout.view(layout, shape) computes layouts.",
)
