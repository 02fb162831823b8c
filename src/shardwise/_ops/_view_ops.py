"""Where torch keeps what the dims of a view are made of."""

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
