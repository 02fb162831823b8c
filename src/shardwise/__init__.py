"""shardwise: distributed tensors for PyTorch.

Write the program for one device, say how its tensors are laid out on a mesh of devices, and run it on many. The names are
those of `torch.distributed.tensor`, so a program moves over by changing its imports.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import arange, empty, eye, full, linspace, logspace, ones, zeros
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.api.random_factories import rand, randint, randn, randperm
from shardwise.api.register_sharding import register_sharding
from shardwise.comm import LaunchError, PerRank, launch, per_rank, simulate
from shardwise.comm.measure import measure_costs as _measure_costs
from shardwise.dispatch import dispatch as _dispatch
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Shard
from shardwise.ops import install_patches as _install_patches
from shardwise.ops import one_device
from shardwise.parallel.describe import describe
from shardwise.parallel.distribute_module import distribute_module
from shardwise.parallel.load_sharded import load_sharded
from shardwise.parallel.materialize import materialize
from shardwise.plan import CostModel, GroupedPlan, Plan, costs, plan_redistribute
from shardwise.rules import RuleError
from shardwise.rules.proof import prove_by as _prove_by
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import CommunicationError, MeshError, PlainTensorError
from shardwise.tensor.policy import policy
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.tensor.seeding import fork_rng, get_rng_state, manual_seed, set_rng_state
from shardwise.torch_internals.tracing import never_compile as _never_compile
from shardwise.verify import prove as _prove

# staticmethod: binding a classmethod costs more than the call itself
DTensor.__torch_dispatch__ = staticmethod(_dispatch)
_never_compile(_dispatch)
CostModel.measure = staticmethod(_measure_costs)
_install_patches()
_prove_by(_prove)

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "CostModel",
    "DTensor",
    "DeviceMesh",
    "GroupedPlan",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MeshError",
    "Partial",
    "PerRank",
    "Placement",
    "PlainTensorError",
    "Plan",
    "Replicate",
    "RuleError",
    "Shard",
    "arange",
    "compute_local_shape_and_global_offset",
    "costs",
    "describe",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "eye",
    "fork_rng",
    "full",
    "get_rng_state",
    "init_device_mesh",
    "launch",
    "linspace",
    "load_sharded",
    "logspace",
    "manual_seed",
    "materialize",
    "one_device",
    "ones",
    "per_rank",
    "plan_redistribute",
    "policy",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute_many",
    "register_sharding",
    "set_rng_state",
    "simulate",
    "zeros",
]
