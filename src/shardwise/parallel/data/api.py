"""`fully_shard` and `replicate`: data parallelism as a choice of layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, members_of
from shardwise.parallel.data.group import Group
from shardwise.parallel.data.module import FSDPModule, make_data_parallel, mark_recomputed
from shardwise.parallel.data.policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.data.shard import (
    Choice,
    check_modules,
    check_policies,
    copy_from_first_rank,
    data_axes,
    default_mesh,
    make_slots,
    modules_to_call,
    shard_choice,
    slots_by_mesh,
)
from shardwise.parallel.data.state import State, groups_in, state_of
from shardwise.parallel.data.statistics import spread_statistics
from shardwise.tensor.dtensor import DTensor

__all__ = ["apply_layouts", "fully_shard", "replicate", "share_comm_ctx"]

_BUCKET_MB = 25.0
_DDP_OPTIONS = frozenset(
    """device_id device_ids output_device dim broadcast_buffers process_group bucket_cap_mb find_unused_parameters check_reduction
    gradient_as_bucket_view static_graph delay_all_reduce_named_params param_to_hook_all_reduce mixed_precision device_mesh
    skip_all_reduce_unused_params init_sync""".split()
)


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Split the parameters of a module over the data axes of a mesh; they are gathered while they are needed.

    The parameters that are not in a group yet become one: call it for submodules first and for the whole model last. Each
    group is gathered by one collective when its module is called and again when the backward pass needs it, and its
    gradients are averaged by one. Parameters may have any shape, be tied, frozen, or DTensors on other axes of the mesh.

    Args:
        module: the module, or a list of modules that form one group. A list or dict of modules is called by its elements.
        mesh: one axis, over which parameters are split; or two, of which the first replicates them (HSDP). By default all
            ranks.
        reshard_after_forward: whether to free the gathered parameters after the forward pass. By default, all but the
            outermost module do. A number is the size of the groups of ranks within which parameters stay gathered: each rank
            keeps a part, and the backward pass gathers within its group.
        shard_placement_fn: returns `Shard(dim)` for a parameter; by default, dim 0 is split. It may return a
            `ShardPlacementResult` for a parameter whose data axes are those of another mesh, such as that of experts.
        mp_policy: the dtypes of compute and reduction.
        offload_policy: `CPUOffloadPolicy()` stores parameters on the CPU.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the data axes of `mesh` by name, if it has others.

    Returns:
        The module, or the list. Its class is now also a `FSDPModule`, and its parameters are DTensors.

    Raises:
        LayoutError: the mesh, its axes or a placement do not fit.
        RuntimeError: a module is data-parallel already.

    Nothing is communicated: each rank takes its blocks from its own parameters.

    >>> import torch, shardwise as sw
    >>> from shardwise.fsdp import fully_shard
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     model = fully_shard(torch.nn.Linear(3, 3), mesh=mesh)
    ...     model(sw.per_rank(lambda rank: torch.full((1, 3), float(rank)))).sum().backward()
    ...     print(model.weight.sharding, model.weight.grad.full_tensor().ranks[0])
    [3:dp, 3] tensor([[0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000]])
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    check_modules(modules, "fully_shard")
    on = data_axes(mesh or default_mesh(modules), dp_mesh_dims, "fully_shard", shard=True)
    apply_layouts(
        "fully_shard",
        modules,
        shard_choice(shard_placement_fn, on),
        mp_policy,
        offload_policy,
        ignored_params,
        whole_mesh=dp_mesh_dims is not None,
        reshard=reshard_after_forward,
    )
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


_PREFIXES = {"fully_shard": "FSDP", "replicate": "Replicate", "zero": "Zero"}


def apply_layouts(
    what: str,
    modules: Sequence[nn.Module],
    choose: Choice,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: Iterable[nn.Parameter] | None,
    *,
    whole_mesh: bool,
    reshard: bool | int | None,
    bucket_bytes: int | None = None,
    plain: bool = False,
) -> State:
    """Make modules data-parallel whose parameters form one group for each mesh, and return what they share.

    `what`: the public function. The others are its arguments.
    """
    check_policies(policy, offload, what)
    with ExitStack() as undo:  # an error leaves the modules as they were
        slots = make_slots(modules, set(ignored or ()), choose, whole_mesh, offload, policy, plain, undo)
        name = type(modules[0]).__name__
        groups = [Group(name, some, policy, bucket_bytes) for some in slots_by_mesh(slots)]
        state = State(name, what, groups, policy)
        state.set_reshard(reshard, what)
        undo.pop_all()
    called = [m for module in modules for m in modules_to_call(module)]
    state.modules = max(1, len(called))
    for module in {id(m): m for m in (*modules, *called)}.values():
        make_data_parallel(module, state, _PREFIXES[what])
    mark_recomputed(modules, groups)
    if slots:
        spread_statistics(modules, tuple(members_of(slots[0].layout.mesh)))
    for module in modules:
        for path, inner in module.named_modules():
            if (theirs := state_of(inner)) is not None and theirs is not state:
                for group in theirs.groups:
                    group.set_path(f"{name}.{path}")
    every = [group for m in modules for group in groups_in(m, recurse=True)]
    layouts = [slot.layout for group in every for slot in group.slots]
    state.axes = frozenset(name for on in layouts for name in axes_of(on.mesh).names_of(on.data))
    state.packs = not all(group.is_in_place for group in every)
    return state


def replicate(
    module: Any,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **ddp_kwargs: Any,
) -> Any:
    """Replicate the parameters of a module over the data axes of a mesh, and average their gradients.

    Gradients are all-reduced in buckets, each as soon as the backward pass has computed it. As in torch there are two forms:

    - `replicate(module, mesh=mesh)`: parameters become DTensors, as those of `fully_shard`, and keep the values of each rank.
    - `replicate(module)` and the options of `DistributedDataParallel`: parameters stay the plain tensors that they are, an
      optimizer that has them keeps them, and its steps cost what they cost on one device. The values of the first rank are
      copied to all others. If a parameter is a DTensor on other axes, all become DTensors as in the first form.

    Args:
        module: the module, or a list of modules that form one group.
        ignored_modules: submodules whose parameters are left as they are.
        mesh: a mesh of any number of axes, all of them data axes. By default all ranks, in DDP's form.
        mp_policy: the dtypes of compute and reduction.
        offload_policy: `CPUOffloadPolicy()` stores parameters on the CPU.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the data axes of `mesh` by name, if it has others.
        **ddp_kwargs: the options of `DistributedDataParallel`. `device_mesh`, `process_group`, `bucket_cap_mb`,
            `find_unused_parameters`, `mixed_precision` and `init_sync` have their meaning; the others are accepted, and without
            effect.

    Returns:
        The module, or the list. Its class is now also a `FSDPModule`.

    Raises:
        LayoutError: the mesh does not fit.
        RuntimeError: the module is data-parallel already.

    With `mesh` nothing is communicated before the backward pass: all ranks must have the same parameters. In DDP's form
    parameters and buffers are broadcast, unless `init_sync=False`.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    check_modules(modules, "replicate")
    if unknown := sorted(set(ddp_kwargs) - _DDP_OPTIONS):
        raise TypeError(
            f"replicate got {', '.join(unknown)}.\n"
            "  why: It takes its own arguments and the options of DistributedDataParallel.\n"
            f"  fix: Leave {', '.join(unknown)} out."
        )
    if not isinstance(device := ddp_kwargs.get("device_id", 0), int | torch.device):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device)}.\n"
            "  why: A module is on one device.\n"
            "  fix: Leave device_id out: the parameters are where they are."
        )
    given = mesh or ddp_kwargs.get("device_mesh") or default_mesh(modules, ddp_kwargs.get("process_group"))
    if dp_mesh_dims is not None and dp_mesh_dims.shard_names:
        raise ValueError(
            f"replicate() with dp_mesh_dims requires replicate-only dims (no shard dims), and got {dp_mesh_dims}.\n"
            "  why: It splits no parameter.\n"
            f"  fix: DataParallelMeshDims(replicate={dp_mesh_dims.shard_names + dp_mesh_dims.replicate_names}), or fully_shard(…)"
        )
    on = data_axes(given, dp_mesh_dims, "replicate", shard=False)
    if (precision := ddp_kwargs.get("mixed_precision")) is not None:
        mp_policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
    ignored = {*(ignored_params or ()), *(p for m in ignored_modules or () for p in m.parameters())}
    cap = ddp_kwargs.get("bucket_cap_mb") or _BUCKET_MB
    state = apply_layouts(
        "replicate",
        modules,
        lambda param: (on, None),
        mp_policy,
        offload_policy,
        ignored,
        whole_mesh=dp_mesh_dims is not None,
        reshard=False,
        bucket_bytes=int(cap * 2**20),
        plain=mesh is None and dp_mesh_dims is None,
    )
    params = [slot.param for group in state.groups for slot in group.slots]
    if mesh is None and ddp_kwargs.get("init_sync", True) and not any(isinstance(p, DTensor) for p in params):
        copy_from_first_rank([*params, *(b for m in modules for b in m.buffers())], on.mesh)
    for group in state.groups:
        group.reduction.reduce_unused = bool(ddp_kwargs.get("find_unused_parameters"))
    return module


replicate.state = state_of  # type: ignore[attr-defined]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted: passes through different models already share what is to be shared."""
    check = [m for m in modules if not isinstance(m, FSDPModule)]
    if check:
        raise ValueError(
            f"Expects FSDPModule but got {type(check[0])} in share_comm_ctx.\n"
            "  why: Only data-parallel modules communicate.\n"
            "  fix: fully_shard(module, mesh=mesh) first"
        )
