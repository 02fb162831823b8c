"""The tensor: making it, moving it, differentiating it, and running ops on it."""

# The class first: what makes DTensors comes after it.
from shardwise.tensor.dtensor import DTensor

# isort: split
from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import arange, empty, eye, full, linspace, ones, zeros
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.api.random_factories import rand, randint, randn, randperm
from shardwise.api.register_sharding import register_sharding
from shardwise.call.trace import watching
from shardwise.ops.dropout import draw_noise_for_dtensors
from shardwise.ops.dropout_functorch import draw_in_transforms
from shardwise.ops.one_device import one_device
from shardwise.ops.prod import divide_products
from shardwise.ops.sparse_factories import make_sparse
from shardwise.ops.torch_python import draw_for_torch
from shardwise.random.stream import follow_torch_seed, follow_torch_state, snapshot
from shardwise.tensor.errors import MeshError
from shardwise.tensor.policy import CommunicationError, implicit_replication, policy
from shardwise.tensor.seeding import fork_rng, get_rng_state, manual_seed, set_rng_state
from shardwise.tensor.serialization import allow_loading
from shardwise.torch_internals.override import give_values
from shardwise.torch_internals.rng import watch_torch_seeding

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
watch_torch_seeding(on_seed=follow_torch_seed, save=snapshot, restore=follow_torch_state)
