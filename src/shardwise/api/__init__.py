"""The functions that create DTensors, map functions over their blocks, and register rules."""

from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import arange, empty, eye, full, linspace, logspace, ones, zeros
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.api.local_map import local_map
from shardwise.api.random_factories import rand, randint, randn, randperm
from shardwise.api.register_sharding import register_sharding

__all__ = [
    "arange",
    "compute_local_shape_and_global_offset",
    "distribute_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "local_map",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_sharding",
    "zeros",
]
