"""shardwise: distributed tensors for PyTorch.

Write the program for one device, say how the tensors lie on a mesh, and run it on many. The names are those
of `torch.distributed.tensor`, so a program moves over by changing its imports.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise.tensor  # isort: split  (interim: the class first)
from shardwise.comm import LaunchError, PerRank, launch, per_rank, simulate
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Shard
from shardwise.ops.one_device import one_device
from shardwise.plan import CostModel, Plan, plan_redistribute
from shardwise.rules import RuleError
from shardwise.rules.proof import prove_by as _prove_by
from shardwise.tensor import (
    CommunicationError,
    DTensor,
    MeshError,
    arange,
    compute_local_shape_and_global_offset,
    distribute_tensor,
    empty,
    eye,
    fork_rng,
    full,
    get_rng_state,
    linspace,
    manual_seed,
    ones,
    policy,
    rand,
    randint,
    randn,
    randperm,
    register_sharding,
    set_rng_state,
    zeros,
)
from shardwise.verify.prove import prove as _prove

# rules cannot run ops, and say so: this is who does
_prove_by(_prove)

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "CostModel",
    "DTensor",
    "DeviceMesh",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MeshError",
    "Partial",
    "PerRank",
    "Placement",
    "Plan",
    "Replicate",
    "RuleError",
    "Shard",
    "arange",
    "compute_local_shape_and_global_offset",
    "distribute_tensor",
    "empty",
    "eye",
    "fork_rng",
    "full",
    "get_rng_state",
    "init_device_mesh",
    "launch",
    "linspace",
    "manual_seed",
    "one_device",
    "ones",
    "per_rank",
    "plan_redistribute",
    "policy",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_sharding",
    "set_rng_state",
    "simulate",
    "zeros",
]
