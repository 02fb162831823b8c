"""The tensor: making it, moving it, differentiating it, and running ops on it."""

# The class first: what makes DTensors comes after it.
from shardwise.tensor.dtensor import DTensor

# isort: split
from shardwise.random.stream import follow_torch
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.factories import arange, empty, eye, full, linspace, ones, zeros
from shardwise.tensor.geometry import compute_local_shape_and_global_offset
from shardwise.tensor.helped import draw_for_torch
from shardwise.tensor.instead import give_values
from shardwise.tensor.noise import draw_noise_for_dtensors
from shardwise.tensor.one_device import one_device
from shardwise.tensor.policy import CommunicationError, implicit_replication, policy
from shardwise.tensor.prod import divide_products
from shardwise.tensor.random_factories import rand, randint, randn, randperm
from shardwise.tensor.register import register_sharding
from shardwise.tensor.rungs import watching
from shardwise.tensor.saved import allow_loading
from shardwise.tensor.seeds import fork_rng, get_rng_state, manual_seed, set_rng_state
from shardwise.tensor.sparse_made import make_sparse
from shardwise.tensor.transformed import draw_in_transforms

__all__ = [
    "CommunicationError",
    "DTensor",
    "MeshError",
    "arange",
    "compute_local_shape_and_global_offset",
    "distribute_tensor",
    "empty",
    "eye",
    "fork_rng",
    "full",
    "get_rng_state",
    "implicit_replication",
    "linspace",
    "manual_seed",
    "one_device",
    "ones",
    "policy",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_sharding",
    "set_rng_state",
    "watching",
    "zeros",
]

allow_loading()
give_values()
make_sparse()
divide_products()
draw_noise_for_dtensors()
draw_for_torch()
draw_in_transforms()
follow_torch()
