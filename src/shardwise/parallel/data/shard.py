"""Turning the parameters of modules into a group: finding them, storing them in their layout, replacing them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import axes_of, block_of, is_simulated, on_mesh
from shardwise.comm.scatter import scatter
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout, LayoutError, Spec, contiguous_stride
from shardwise.parallel.data.layouts import DataAxes, ParameterLayout, have_common_mesh, parameter_layout
from shardwise.parallel.data.module import FSDPModule
from shardwise.parallel.data.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwise.parallel.data.slot import Slot
from shardwise.parallel.data.state import state_of
from shardwise.tensor.construct import empty_like_block
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.torch_internals.local_tensor import local_modes
from shardwise.torch_internals.modules import own_parameters, set_parameter

__all__ = [
    "check_modules",
    "check_policies",
    "copy_from_first_rank",
    "data_axes",
    "default_mesh",
    "make_slots",
    "modules_to_call",
    "shard_choice",
    "slots_by_mesh",
]

_LAYOUT, _STORED = "_shardwise_layout", "_shardwise_stored"
_grouped: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The names of the parameters in each module that a group has."""
Choice = Callable[[nn.Parameter], tuple[DataAxes, int | None]]
"""The data axes of a parameter and the dim that they split, or None for a parameter that stays replicated."""

_default_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()
at_simulation_end(_default_meshes.clear)


def default_mesh(modules: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> DeviceMesh:
    """The mesh of one axis with all ranks, or those of a group, on the device of the modules; the same one for all calls."""
    if not dist.is_initialized() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise LayoutError(
            "A module cannot be made data-parallel: there is no mesh.",
            why="mesh was not given, and torch.distributed is not initialized.",
            fix="Start with torchrun or shardwise.launch, or pass mesh=init_device_mesh(…).",
        )
    devices = [p.device.type for m in modules for p in m.parameters()]
    kind = next((d for d in devices if d != "meta"), "cpu")
    if not dist.is_initialized():
        dist.init_process_group()
    found = _default_meshes.setdefault(group or dist.group.WORLD, {})  # type: ignore[arg-type]
    if kind not in found:
        if group is None or group is dist.group.WORLD:
            found[kind] = init_device_mesh(kind, (dist.get_world_size(),))
        else:
            found[kind] = DeviceMesh.from_group(group, kind)
    return found[kind]


def data_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None, what: str, *, shard: bool) -> DataAxes:
    """The data axes of a mesh: all of them, or those that `dims` names."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{what} got {type(mesh).__name__} for a mesh.\n"
            "  why: mesh is a DeviceMesh.\n"
            "  fix: Make one with init_device_mesh."
        )
    on = axes_of(mesh)
    if dims is not None:
        if missing := [n for n in (*dims.shard_names, *dims.replicate_names) if n not in on.names]:
            raise LayoutError(
                f"{what} got {dims}: {', '.join(missing)} not found in mesh.mesh_dim_names.",
                why=f"The axes of the mesh are {on}.",
                fix="Name axes of the mesh.",
            )
        split = tuple(on.index(n) for n in dims.shard_names)
        copied = tuple(on.index(n) for n in dims.replicate_names)
        if set(split) & set(copied):
            raise LayoutError(
                f"{what} got {dims}.",
                why="An axis splits parameters or replicates them.",
                fix="Name each axis once.",
            )
        return DataAxes(mesh, split if shard else (), copied if shard else tuple(sorted({*split, *copied})))
    if not shard:
        return DataAxes(mesh, (), tuple(range(mesh.ndim)))
    if mesh.ndim > 2:
        raise LayoutError(
            f"{what} expects a 1D or 2D DeviceMesh but got {mesh}, of {mesh.ndim} axes ({on}).",
            why="A mesh of one axis splits parameters over it; one of two replicates over the first and splits over the second.",
            fix=f'Pass a slice, mesh["dp"], or name the axes: dp_mesh_dims=DataParallelMeshDims(shard="{on.names[0]}").',
        )
    return DataAxes(mesh, (mesh.ndim - 1,), tuple(range(mesh.ndim - 1)))


def shard_choice(fn: Callable[[nn.Parameter], Any] | None, on: DataAxes) -> Choice:
    """The data axes of a parameter and the dim that they split: what the user's function says, or the first dim."""

    def choose(param: nn.Parameter) -> tuple[DataAxes, int | None]:
        given = None if fn is None else fn(param)
        axes = on
        if (info := getattr(given, "mesh_info", None)) is not None:
            axes = _axes_of_info(info)
        given = getattr(given, "placement", given)
        if not param.dim():
            return axes, None
        dim = 0 if given is None else getattr(given, "dim", None)
        if not isinstance(dim, int) or not -param.dim() <= dim < param.dim():
            what = f"Shard dim {dim} is invalid for {param.dim()}D tensor: {param.shape}"
            raise ShardDimError(
                f"Invalid shard_placement_fn result: {given!r}." if dim is None else f"{what}.",
                why="It returns Shard(dim) of one of the parameter's dims, None for Shard(0), or "
                "ShardPlacementResult(Shard(dim), mesh) for a parameter on a mesh of its own.",
                fix=f"Return Shard(dim) with a dim in {-param.dim()}..{param.dim() - 1}.",
            )
        return axes, dim % param.dim()

    return choose


def _axes_of_info(info: Any) -> DataAxes:
    """The data axes of a parameter on a mesh of its own: of a mesh, or of an object that says what its axes are for."""
    mesh = getattr(info, "mesh", info)
    if isinstance(info, DeviceMesh) or not hasattr(info, "shard_mesh_dim"):
        return data_axes(info, None, "shard_placement_fn", shard=True)
    split, copied = info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    return DataAxes(mesh, *((() if a is None else (a,)) for a in (split, copied)))


# AssertionError is what torch raises in these two cases.
class ShardDimError(LayoutError, AssertionError):
    """A parameter cannot be split as `shard_placement_fn` says."""


class AppliedTwiceError(RuntimeError, AssertionError):
    """A module is data-parallel already."""


def check_modules(modules: Sequence[Any], what: str) -> None:
    """Raise unless these are modules that are not data-parallel yet, outside of torch's LocalTensorMode."""
    if local_modes:
        raise NotImplementedError(
            f"{what} was called inside torch's LocalTensorMode.\n"
            "  why: Gathered parameters and reduced gradients are views of one buffer per rank, which are no LocalTensors.\n"
            "  fix: with shardwise.simulate(n): ... has all ranks in one process, too"
        )
    if not modules:
        raise ValueError(
            f"{what} got an empty list.\n  why: There is nothing to shard.\n  fix: {what}([module, …], mesh=mesh)"
        )
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{what} got a {type(module).__name__}.\n  why: It applies to modules.\n  fix: {what}(module, mesh=mesh)"
            )
        state = state_of(module)
        if state is not None and state.made_by != what:
            raise AppliedTwiceError(
                f"Cannot apply `{what}()` on a Module already managed by `{state.made_by}`: a {type(module).__name__}.\n"
                "  why: Its parameters have the layouts of the first call.\n"
                f"  fix: Call one of them for each module; {what} of a module around it takes the other parameters."
            )
        if state is not None or isinstance(module, FSDPModule) or modules.count(module) > 1:
            raise AppliedTwiceError(
                f"{what} was called twice for a {type(module).__name__}.\n"
                "  why: Its parameters are in a group already. Each distinct composable distributed API can only be applied "
                "to a module once.\n"
                f"  fix: Call {what} once for each module, and for submodules before the modules that contain them."
            )


def check_policies(policy: object, offload: object, what: str) -> None:
    """Raise unless these are policies."""
    for name, found, kind in (
        ("mp_policy", policy, MixedPrecisionPolicy),
        ("offload_policy", offload, OffloadPolicy),
    ):
        if not isinstance(found, kind):
            raise TypeError(
                f"{what} got {name}={found!r}.\n"
                f"  why: {name} is a {kind.__name__}.\n"
                "  fix: MixedPrecisionPolicy(param_dtype=torch.bfloat16), CPUOffloadPolicy()"
            )


def modules_to_call(module: nn.Module) -> list[nn.Module]:
    """The module if it can be called, or else those inside a list or dict of modules that can."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [m for child in module.children() if state_of(child) is None for m in modules_to_call(child)]


def _places(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """The parameters of modules that are in no group, each with its name, module and name there."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        if id(module) in seen or state_of(module) is not None:
            return
        seen.add(id(module))
        for name, param in own_parameters(module).items():
            if param is not None:
                yield prefix + name, module, name, param
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")

    for module in modules:
        yield from walk(module, "")


def make_slots(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    choose: Choice,
    whole_mesh: bool,
    offload: OffloadPolicy,
    policy: MixedPrecisionPolicy,
    plain: bool,
) -> list[Slot]:
    """Store the parameters of modules in their layouts; a parameter that several of them share is one slot.

    With `plain`, replicated parameters stay plain tensors, unless some are DTensors: optimizers take one kind together.
    """
    found: dict[int, tuple[str, Any, list[tuple[nn.Module, str]]]] = {}
    skipped = {id(p) for p in ignored}
    for fqn, module, name, param in _places(modules):
        if id(param) not in skipped:
            if name in _grouped.get(module, ()) and _LAYOUT in vars(param):
                raise _applied_outside(fqn, modules)
            # tied to a parameter of another group, which was replaced there
            current = vars(param).get(_STORED, param)
            found.setdefault(id(current), (fqn, current, []))[2].append((module, name))
    plain = plain and not any(isinstance(param, DTensor) for _, param, _ in found.values())
    slots = []
    for fqn, param, places in found.values():
        layout: ParameterLayout | None = vars(param).get(_LAYOUT)
        stored = param
        if layout is None:
            layout = parameter_layout(param, *choose(param), whole_mesh, plain)
            stored = _stored(param, layout, offload)
            vars(stored)[_LAYOUT] = layout
            if stored is not param:
                vars(param)[_STORED] = stored
                if param.requires_grad:
                    param.register_hook(_Replaced(fqn))
        for module, name in places:
            set_parameter(module, name, stored)
            _grouped.setdefault(module, set()).add(name)
        slots.append(Slot(fqn, places, layout, policy, policy.dtype_of(stored)))
    return slots


def _applied_outside(name: str, modules: Sequence[nn.Module]) -> AppliedTwiceError:
    kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in modules))
    return AppliedTwiceError(
        f"The parameter {name} of a {kinds} is in the group of a module around it.\n"
        "  why: A module takes all parameters in it that no group has yet, so those of the module around it were taken first.\n"
        "  fix: Call fully_shard or replicate for inner modules before those that contain them."
    )


def copy_from_first_rank(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Give plain tensors the values that the first rank of the mesh has: one broadcast for each dtype."""
    if is_simulated():  # all ranks have the same
        return
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some = [t.detach() for t in tensors if t.dtype is dtype and t.numel() and not t.is_meta]
        flat = torch.cat([t.reshape(-1) for t in some]) if some else None
        found = flat is not None and scatter(flat, Layout.replicated(flat.shape, axes_of(mesh)), mesh, 0)
        if isinstance(found, Tensor):
            for t, part in zip(some, found.split([t.numel() for t in some]), strict=True):
                t.copy_(part.view(t.shape))


class _Replaced:
    """A hook of a parameter that was replaced: a gradient of it means that a module outside of the group still has it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, grad: Tensor) -> None:
        raise RuntimeError(
            f"The parameter {self._name} got a gradient in a module that is not data-parallel.\n"
            "  why: It is tied: a data-parallel module has it as a DTensor, and another module still computes with the original, "
            "whose gradient would not be reduced.\n"
            "  fix: Also call fully_shard or replicate for the other module, or for the module that contains both."
        )


def slots_by_mesh(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots whose collectives can run on one mesh, together."""
    out: list[list[Slot]] = []
    for slot in slots:
        for some in out:
            if have_common_mesh([some[0].layout.mesh, slot.layout.mesh]):
                some.append(slot)
                break
        else:
            out.append([slot])
    return out


def _stored(param: Any, layout: ParameterLayout, offload: OffloadPolicy) -> Any:
    """The parameter in the layout in which it is stored."""
    spec_shape = torch.Size(layout.stored.shape)
    stride = contiguous_stride(spec_shape)
    if isinstance(param, DTensor):
        if layout.stored is layout.computed and layout.mesh == param.device_mesh:
            return param
        whole = DTensor(
            param._local_tensor.detach(), Spec(layout.mesh, layout.computed, param.dtype, spec_shape, stride)
        )
        with torch.no_grad():
            (out,) = redistribute_many([whole], [layout.stored])
        if layout.stored is layout.computed:
            out = DTensor(out._local_tensor.clone(), out._spec)
    else:
        full: Tensor = param.detach()
        if full.device.type not in (layout.mesh.device_type, "meta"):
            full = full.to(layout.mesh.device_type)
        if layout.stored_plain:
            return param if full.device == param.device else nn.Parameter(full, param.requires_grad)
        block = on_mesh(layout.mesh, lambda coord: block_of(full, layout.stored, coord))
        if block is None:
            block = empty_like_block(full)
        out = DTensor(block, Spec(layout.mesh, layout.stored, full.dtype, spec_shape, stride))
    if isinstance(offload, CPUOffloadPolicy) and layout.mesh.device_type != "cpu":
        out = DTensor(out._local_tensor.cpu(), out._spec)
    new = nn.Parameter(out, requires_grad=param.requires_grad)
    vars(new).update({k: v for k, v in vars(param).items() if k not in (_STORED, _LAYOUT)})
    return new
