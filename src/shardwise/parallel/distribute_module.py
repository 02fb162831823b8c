"""Distributing a module: its parameters and buffers, its inputs and outputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, current_mesh
from shardwise.layout import LayoutError
from shardwise.parallel.agreement import read_alike
from shardwise.parallel.boundary import Boundary
from shardwise.parallel.forward import is_parallelized, wrap_method
from shardwise.parallel.module_tensors import device_problems, group_ties, slots_of
from shardwise.parallel.placing import place_tensors, restore_ties
from shardwise.parallel.recurrent import run_batches_on_blocks
from shardwise.tensor.dtensor import DTensor

__all__ = ["distribute_module"]

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Distribute the parameters and buffers of a module over a mesh, in place.

    Args:
        module: the module. Tied parameters stay one object, `requires_grad` stays, and attributes such as `in_features`
            keep their global meaning.
        device_mesh: the mesh; by default the one of the `with mesh:` around the call.
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every module in the tree; it may register
            DTensors as parameters. What it leaves plain is replicated.
        input_fn: called as `input_fn(module, args, mesh)` before each forward pass; it returns the arguments.
        output_fn: called as `output_fn(module, outputs, mesh)` after it; it returns the outputs.

    Returns:
        The module. In its forward pass plain tensors count as replicated.

    Raises:
        LayoutError: the module is distributed already, a parameter is not on the mesh's device type, or the ranks have
            modules of different structure.

    The rank with coordinate 0 sends each rank its blocks.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     layer = distribute_module(nn.Linear(4, 6), mesh)
    ...     print(layer.weight.sharding, layer.in_features)
    [6, 4] 4
    """
    mesh = current_mesh(device_mesh, "distribute_module")
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"distribute_module got {type(module).__name__} for a module.\n"
            "  why: It distributes the parameters and buffers of an nn.Module.\n"
            "  fix: Pass the module; distribute_tensor(x, mesh, placements) distributes a single tensor."
        )
    read_alike(lambda: _check(module, mesh), module, mesh, "distribute_module")
    ties = group_ties(slots_of(module))
    if partition_fn is not None:
        for name, child in module.named_modules():
            partition_fn(name, child, mesh)
        restore_ties(ties)
    place_tensors(module, mesh, {}, src_data_rank=0)
    vars(module)["_distribute_module_applied"] = True
    if input_fn is not None:
        enter = _with_module(input_fn, "input")
        module.register_forward_pre_hook(lambda m, args: enter(m, args, mesh))
    if output_fn is not None:
        leave = _with_module(output_fn, "output")
        module.register_forward_hook(lambda m, args, out: leave(m, out, mesh))
    for child in module.modules():
        run_batches_on_blocks(child)
    if not is_parallelized(module):
        wrap_method(module, "forward", Boundary(mesh, 0), plain=False)
    return module


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if vars(module).get("_distribute_module_applied", False):
        raise LayoutError(
            "distribute_module should only be called once on a module, but it has already been called on this module!",
            why="Its parameters are distributed and its forward pass has the hooks of the first call.",
            fix="Give everything in one call, or redistribute single parameters.",
        )
    foreign = device_problems(((s.full_name, s.tensor) for s in slots_of(module)), mesh)
    if foreign:
        raise LayoutError(
            f"distribute_module got {foreign[0]}.",
            why="Blocks are on the devices of their mesh.",
            fix=f"module.to({mesh.device_type!r}) first",
        )
    others = [s for s in slots_of(module) if isinstance(s.tensor, DTensor) and s.tensor.device_mesh != mesh]
    if others:
        raise LayoutError(
            f"distribute_module got {others[0].full_name}, which is already distributed, over {others[0].tensor.device_mesh}.",  # type: ignore[attr-defined]
            why=f"A tensor is on one mesh, and this one is ({axes_of(mesh)}).",
            fix="Distribute it over the same mesh.",
        )


def _with_module(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function of the module, its inputs or outputs, and the mesh, as the user gave it or in the older form without the module."""
    count = len(inspect.signature(fn).parameters)
    if count == 2:
        warnings.warn(
            f"Deprecating {what}_fn that takes two arguments ({what}s, device_mesh), "
            f"please use {what}_fn that takes in (module, {what}s, device_mesh) instead!",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _, values, mesh: fn(values, mesh)
    if count != 3:
        raise ValueError(
            f"{what}_fn should take in 3 arguments, but got {count} arguments!\n"
            "  why: It is called with the module, its inputs or outputs, and the mesh.\n"
            f"  fix: def {what}_fn(module, values, device_mesh): ..."
        )
    return fn
