"""Parallelizing a module by a plan: styles, names of styles, or layouts of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, current_mesh
from shardwise.parallel.agreement import read_alike
from shardwise.parallel.boundary import Boundary
from shardwise.parallel.forward import is_parallelized, wrap_method
from shardwise.parallel.keys import matching
from shardwise.parallel.later_modules import watch_for_modules
from shardwise.parallel.linear import run_on_blocks
from shardwise.parallel.module_tensors import group_ties, slots_of
from shardwise.parallel.parallel_style import ParallelStyle
from shardwise.parallel.placing import place_tensors, restore_ties
from shardwise.parallel.plan import PlanError, Resolved, plan_axis, plan_error, read_names, unmatched_problem
from shardwise.parallel.recurrent import run_batches_on_blocks

__all__ = ["parallelize_module"]

Plan = ParallelStyle | Mapping[str, ParallelStyle | str]

_CALLING_FORWARD = ("generate",)
"""Methods that call `forward` and handle what it keeps between calls, such as a cache of keys and values."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a module by a plan, in place.

    Args:
        module: the module; built on the meta device it is initialised afterwards, by `materialize`.
        device_mesh: a mesh of one axis, such as `mesh["tp"]`; for plans of strings also a mesh with an axis named `tp`, whose
            other axes replicate the parameters. By default the one of the `with mesh:` around the call.
        parallelize_plan: a style for the module, or a dictionary. Its keys are dotted names of modules or parameters, each token a
            pattern as for file names (`layers.*.attn.w[qkv]`), `""` the module itself. Its values are styles, names of styles
            (Hugging Face's: `colwise`, `rowwise`, `sequence_parallel`, ...) or layouts of parameters (`"[o:tp, i]"`).
        src_data_rank: the rank along the axis whose parameters are distributed. With None each rank takes its block from
            its own, and nothing is communicated.

    Returns:
        The module. With strings in the plan, all its parameters and buffers are DTensors, and so are its activations; plain
        tensors that its own code makes count as replicated. Called with plain tensors only it returns plain tensors.

    Raises:
        PlanError: the plan does not fit the module or the mesh. It lists all problems, and nothing was changed.

    Every rank gets its blocks from the source rank, after one small all-gather that compares the structure of the modules.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    ...     _ = parallelize_module(mlp, mesh, {"0": "colwise", "2": "rowwise"})
    ...     print(mlp[0].weight.sharding, mlp[2].weight.sharding, type(mlp(torch.ones(3, 4))).__name__)
    [6:tp, 4] [4, 6:tp] Tensor
    """
    mesh = current_mesh(device_mesh, "parallelize_module")
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"parallelize_module got {type(module).__name__} for a module.\n"
            "  why: A plan is about the parameters and calls of an nn.Module.\n"
            "  fix: Pass the module; distribute_tensor(x, mesh, placements) distributes a single tensor."
        )
    if not parallelize_plan:
        warnings.warn(
            "No parallelize_plan is provided and auto-parallel is not supported at the moment, so this parallelize_module "
            "call will do nothing.",
            stacklevel=2,
        )
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan = {"": parallelize_plan}
    elif not isinstance(parallelize_plan, Mapping):
        raise TypeError(
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(parallelize_plan)} found!\n"
            "  why: A plan is a style, or a dictionary from names to styles.\n"
            '  fix: parallelize_module(module, mesh, {"layers.*.mlp.up": "colwise"})'
        )
    plan = parallelize_plan
    if src_data_rank is None:
        styles, resolved = _read(module, mesh, plan)
    else:
        text = repr(sorted(map(str, plan.items())))
        styles, resolved = read_alike(
            lambda: _read(module, mesh, plan), module, mesh, "parallelize_module", text
        )
    ties = group_ties(slots_of(module))
    for style, child in styles:
        style.src_data_rank = src_data_rank
        style._apply(child, mesh)
    restore_ties(ties)
    if resolved is not None:
        _apply_names(module, mesh, resolved, src_data_rank)
    return module


def _read(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle | str]
) -> tuple[list[tuple[ParallelStyle, nn.Module]], Resolved | None]:
    """The styles with their modules, and what the strings say; raises one error for all problems of the plan."""
    modules = dict(module.named_modules(remove_duplicate=False))
    names = {key: value for key, value in plan.items() if not isinstance(value, ParallelStyle)}
    resolved, problems = read_names(module, mesh, names) if names else (None, [])
    styles: list[tuple[ParallelStyle, nn.Module]] = []
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            continue
        found = matching(key, modules)
        if not found:
            problems.append(unmatched_problem(key, modules))
        if names and getattr(style, "use_local_output", False):
            problems.append(
                f"{key!r}: {type(style).__name__}(use_local_output=True) in a plan with strings, where activations are "
                "DTensors; use_local_output=False"
            )
        for name in found:
            problems += [f"{key!r}: {p}" for p in style._problems(modules[name], mesh)]
            styles.append((style, modules[name]))
    if problems:
        raise plan_error(problems)
    if styles and mesh.ndim != 1:
        raise PlanError(
            f"parallelize_module got styles for a mesh of {mesh.ndim} axes ({axes_of(mesh)}).",
            why="The blocks that styles pass between modules are blocks on one axis.",
            fix=f'Pass the axis: mesh["{axes_of(mesh).names[-1]}"], or name the styles by strings.',
        )
    return styles, resolved


def _apply_names(module: nn.Module, mesh: DeviceMesh, resolved: Resolved, src_data_rank: int | None) -> None:
    """Apply a plan of strings: DTensors flow through the whole module."""
    place_tensors(module, mesh, resolved.layouts, src_data_rank)
    default = Boundary(mesh, plan_axis(mesh))
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or is_parallelized(child):
            continue
        if child is module or name in resolved.boundaries or any(True for _ in child.parameters()):
            run_on_blocks(child)
            run_batches_on_blocks(child)
            wrap_method(child, "forward", resolved.boundaries.get(name, default))
    for name in _CALLING_FORWARD:
        if callable(getattr(module, name, None)):
            wrap_method(module, name)
    watch_for_modules(module, default)
