"""shardwise: distributed tensors for PyTorch.

Write the program for one device, say how its tensors are laid out on a mesh of devices, and run it on many. The names are
those of `torch.distributed.tensor`, so a program moves over by changing its imports.
"""

from importlib import import_module as _import_module
from os import environ as _environ
from typing import Any as _Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._dtensor_spec import DTensorSpec as _DTensorSpec  # noqa: F401
from shardwise._dtensor_spec import TensorMeta as _TensorMeta  # noqa: F401
from shardwise.api.distribute import distribute_tensor
from shardwise.api.factories import arange, empty, eye, full, linspace, logspace, ones, zeros
from shardwise.api.geometry import compute_local_shape_and_global_offset
from shardwise.api.op_dispatcher import OpDispatcher as _OpDispatcher
from shardwise.api.random_factories import rand, randint, randn, randperm
from shardwise.api.register_sharding import register_sharding
from shardwise.call.moved_view import MovedView as _MovedView
from shardwise.checkpoint.load_sharded import load_sharded
from shardwise.comm import LaunchError, PerRank, launch, per_rank, simulate
from shardwise.comm.measure import measure_costs as _measure_costs
from shardwise.debug.describe import describe
from shardwise.debug.divergence import DivergenceError
from shardwise.debug.sanitize import sanitize
from shardwise.dispatch import dispatch as _dispatch
from shardwise.drop_in import InstallError, install, installed
from shardwise.drop_in import support_state_dicts as _support_state_dicts
from shardwise.faults import PeerError, guard
from shardwise.layout import Layout, LayoutError, Partial, Placement, Replicate, Shard
from shardwise.layout import StridedShard as _StridedShard  # noqa: F401
from shardwise.ops import install_patches as _install_patches
from shardwise.ops import one_device
from shardwise.parallel.distribute_module import distribute_module
from shardwise.parallel.materialize import materialize
from shardwise.plan import CostModel, GroupedPlan, Plan, costs, plan_redistribute
from shardwise.rules import RuleError
from shardwise.rules.proof import prove_by as _prove_by
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import CommunicationError, MeshError, PlainTensorError
from shardwise.tensor.policy import policy
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.tensor.seeding import fork_rng, get_rng_state, manual_seed, set_rng_state
from shardwise.torch_internals.foreach_types import support_foreach as _support_foreach
from shardwise.torch_internals.tracing import never_compile as _never_compile
from shardwise.verify import prove as _prove

# staticmethod: binding a classmethod costs more than the call itself
DTensor.__torch_dispatch__ = staticmethod(_dispatch)
_never_compile(_dispatch)
DTensor._op_dispatcher = _OpDispatcher()
CostModel.measure = staticmethod(_measure_costs)
_install_patches()
_support_foreach(DTensor)
_support_foreach(_MovedView)
_support_state_dicts()
_prove_by(_prove)

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "CostModel",
    "DTensor",
    "DeviceMesh",
    "DivergenceError",
    "GroupedPlan",
    "InstallError",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MeshError",
    "Partial",
    "PeerError",
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
    "guard",
    "init_device_mesh",
    "install",
    "installed",
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
    "sanitize",
    "set_rng_state",
    "simulate",
    "zeros",
]

_SUBMODULES = frozenset(
    "_api _collective_utils _ops _random _redistribute _shards_wrapper _utils checkpoint compile debug device_mesh experimental native placement_types".split()
)
"""Modules that torch's package has as attributes; ours are imported when they are first asked for."""


def __getattr__(name: str) -> _Any:
    if name == "elastic":
        return _import_module("shardwise.recovery").elastic
    if name in _SUBMODULES:
        return _import_module(f"shardwise.{name}")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


if _environ.get("SHARDWISE_NATIVE") == "1":
    _import_module("shardwise.native").enable()
