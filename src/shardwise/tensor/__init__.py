"""The tensor: making it, moving it, differentiating it, and running ops on it."""

# The class first: what makes DTensors comes after it.
from shardwise.tensor.dtensor import DTensor

# isort: split
from shardwise.tensor.create import distribute_tensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.factories import arange, empty, eye, full, linspace, ones, zeros
from shardwise.tensor.geometry import compute_local_shape_and_global_offset
from shardwise.tensor.policy import CommunicationError, implicit_replication, policy
from shardwise.tensor.reads_values import give_values
from shardwise.tensor.register import register_sharding
from shardwise.tensor.rungs import watching
from shardwise.tensor.saved import allow_loading

__all__ = [
    "CommunicationError",
    "DTensor",
    "MeshError",
    "arange",
    "compute_local_shape_and_global_offset",
    "distribute_tensor",
    "empty",
    "eye",
    "full",
    "implicit_replication",
    "linspace",
    "ones",
    "policy",
    "register_sharding",
    "watching",
    "zeros",
]

allow_loading()
give_values()
