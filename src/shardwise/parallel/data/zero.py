"""`zero`: replicated parameters, with gradients and optimizer state split over the data axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import block_of, on_mesh
from shardwise.layout import Spec, contiguous_stride
from shardwise.parallel.data.api import apply_layouts
from shardwise.parallel.data.policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.data.shard import check_modules, data_axes, default_mesh, shard_choice
from shardwise.tensor.construct import empty_like_block
from shardwise.tensor.dtensor import DTensor

__all__ = ["zero"]

_BUCKET_BYTES = 25 * 2**20


def zero(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Keep parameters gathered on every rank, and split their gradients and optimizer state over the data axes (ZeRO).

    The optimizer updates the block of each rank, and the next forward pass gathers the blocks: per step one reduce-scatter and
    one all-gather of the parameters, the bytes of an all-reduce.

    Args:
        module: the module.
        optimizer: its optimizer, which has not made a step; its parameters are replaced by the split ones.
        stage: 1 reduces gradients at the end of a backward pass, 2 in buckets as soon as they are computed, which holds fewer
            of them.
        mesh: one axis, over which gradients are split; or two, of which the first replicates them. By default all ranks.
        mp_policy: the dtypes of compute and reduction.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the data axes of `mesh` by name, if it has others.

    Returns:
        The module. Its class is now also a `FSDPModule`, and its parameters are DTensors, split as the optimizer's.

    Raises:
        ValueError: the stage is neither 1 nor 2.
        RuntimeError: the optimizer has state, or the module is data-parallel already.

    Nothing is communicated: each rank takes its blocks from its own parameters.
    """
    if stage not in (1, 2):
        raise ValueError(
            f"zero got stage={stage!r}.\n"
            "  why: Stage 1 and 2 split the optimizer state, 2 also the gradients; stage 3 splits the parameters.\n"
            "  fix: zero(module, optimizer, stage=2), or fully_shard(module) for stage 3"
        )
    check_modules([module], "zero")
    _check_optimizer(optimizer, module)
    before = dict(module.named_parameters())
    state = apply_layouts(
        "zero",
        [module],
        shard_choice(None, data_axes(mesh or default_mesh([module]), dp_mesh_dims, "zero", shard=True)),
        mp_policy,
        OffloadPolicy(),
        ignored_params,
        whole_mesh=dp_mesh_dims is not None,
        reshard=False,
        bucket_bytes=_BUCKET_BYTES if stage == 2 else None,
    )
    for parameters in state.groups:
        parameters.reshard_after_backward = False
    after = dict(module.named_parameters())
    new = {id(old): after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(p), p) for p in group["params"]]  # LBFGS refers to this list
    for old in [p for p in optimizer.state if new.get(id(p), p) is not p]:
        split = new[id(old)]
        optimizer.state[split] = {k: _split_as(v, split) for k, v in optimizer.state.pop(old).items()}
    return module


def _check_optimizer(optimizer: Any, module: nn.Module) -> None:
    """Raise unless this is an optimizer of the module's parameters that has not made a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"zero got a {type(optimizer).__name__} for the optimizer.\n"
            "  why: The optimizer of the module is to update the block of each rank.\n"
            "  fix: zero(module, torch.optim.AdamW(module.parameters()), mesh=mesh)"
        )
    # Adagrad has a state from the beginning
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise RuntimeError(
            "zero got an optimizer that has made a step.\n"
            "  why: Its state belongs to the whole parameters.\n"
            "  fix: Call zero before the first step, and load a checkpoint afterwards."
        )
    theirs = {id(p) for p in module.parameters() if p.requires_grad}
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if theirs and not theirs & mine:
        raise ValueError(
            f"zero got an optimizer that has no parameter of the {type(module).__name__}.\n"
            "  why: It would update other tensors than those that the module computes with.\n"
            "  fix: zero(module, torch.optim.AdamW(module.parameters()), mesh=mesh)"
        )


def _split_as(value: Any, param: Any) -> Any:
    """An entry of an optimizer's state for a parameter that was split: split as it is, if it has its shape."""
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, DTensor)
        or value.shape != param.shape
        or not value.dim()
    ):
        return value
    block = on_mesh(param.device_mesh, lambda coord: block_of(value, param.sharding, coord))
    spec = Spec(param.device_mesh, param.sharding, value.dtype, value.shape, contiguous_stride(value.shape))
    return DTensor(empty_like_block(value) if block is None else block, spec)
