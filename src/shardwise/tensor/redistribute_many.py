"""Redistribution of many tensors together, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Pending, check_reducible
from shardwise.comm.local_mode import outside_local_mode
from shardwise.comm.run_many import PendingBlocks, run_many, start_many
from shardwise.layout import Layout, LayoutError, Placement, Spec, contiguous_stride
from shardwise.plan import GroupedPlan, Item, plan_redistribute_many
from shardwise.tensor.async_tensor import AsyncDTensor
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute import densify, returned_layout
from shardwise.torch_internals.collectives import subjects
from shardwise.torch_internals.dispatcher import below_autograd

__all__ = ["PendingBlocks", "RedistributeMany", "move_blocks", "redistribute_many", "start_moving_blocks"]

Target = Sequence[Placement] | Layout


@outside_local_mode
def redistribute_many(
    tensors: Sequence[DTensor],
    placements: Target | Sequence[Target],
    async_op: bool = False,
) -> list[DTensor]:
    """Redistribute many tensors with few collectives; differentiable.

    Equal to `[x.redistribute(placements=p) for x, p in zip(tensors, placements)]`, with the same bytes, but the steps of one
    kind over the same mesh axes are one collective on a flat buffer, whatever the dtypes; reductions are one per dtype.

    Args:
        tensors: DTensors of any shapes, dtypes and layouts. Those of one mesh move together.
        placements: the target of each tensor: one placement per mesh axis, or a `Layout`. A single list of placements is
            the target of all tensors.
        async_op: return at once; each result waits for the collective when it is first used.

    Returns:
        The redistributed tensors. Results of one collective are parts of one buffer, which lives as long as one of them.

    Raises:
        LayoutError: a target does not fit its tensor, or there is not one for each tensor.
        TypeError: one of the tensors is not a DTensor.

    It sends the plan that `plan_redistribute_many` prints, one for each mesh.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     tensors = [sw.distribute_tensor(torch.ones(n), mesh, [sw.Shard(0)]) for n in (3, 4)]
    ...     with sw.debug.CommDebugMode() as comm:
    ...         a, b = sw.redistribute_many(tensors, [sw.Replicate()])
    ...     print(a.sharding, b.sharding, comm.get_total_counts(), comm.get_total_bytes())
    [3] [4] 1 28
    """
    tensors = list(tensors)
    _check_tensors(tensors)
    targets = _targets(tensors, placements)
    out: list[DTensor | None] = [None] * len(tensors)
    by_mesh: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        if x._spec.stride is None:  # sparse tensors have no flat blocks
            out[i] = x.redistribute(placements=targets[i].placements)
        else:
            by_mesh.setdefault(id(x._spec.mesh), []).append(i)
    for indices in by_mesh.values():
        some = [tensors[i] for i in indices]
        found = RedistributeMany.apply(tuple(targets[i] for i in indices), async_op, *some)  # type: ignore[no-untyped-call]
        for i, x in zip(indices, found, strict=True):
            out[i] = x
    return [x for x in out if x is not None]


def _check_tensors(tensors: Sequence[Any]) -> None:
    wrong = [i for i, x in enumerate(tensors) if not isinstance(x, DTensor)]
    if wrong:
        kinds = ", ".join(f"{type(tensors[i]).__name__} at index {i}" for i in wrong[:4])
        raise TypeError(
            f"redistribute_many got {kinds}.\n"
            "  why: Only DTensors have a layout to move from.\n"
            "  fix: distribute_tensor(x, mesh, placements) first"
        )


def _targets(tensors: Sequence[DTensor], placements: Any) -> list[Layout]:
    """The target layout of each tensor."""
    if isinstance(placements, Sequence) and placements and all(isinstance(p, Placement) for p in placements):
        placements = [placements] * len(tensors)
    if (
        isinstance(placements, Layout)
        or not isinstance(placements, Sequence)
        or len(placements) != len(tensors)
    ):
        count = f"{len(placements)} targets" if isinstance(placements, Sequence) else repr(placements)
        raise LayoutError(
            f"redistribute_many got {count} for {len(tensors)} tensors.",
            why="Each tensor has its own target, except that one list of placements may be that of all.",
            fix="redistribute_many([x, y], [[Shard(0)], [Replicate()]])",
        )
    out = []
    for x, target in zip(tensors, placements, strict=True):
        spec = x._spec
        if not isinstance(target, Layout):
            target = Layout.of(spec.layout.shape, spec.layout.axes, target)
        elif target.shape != spec.layout.shape or target.axes != spec.layout.axes:
            raise LayoutError(
                f"redistribute_many got the target {target} for {spec}.",
                why=f"The target has shape {target.shape} on ({target.axes}), the tensor {tuple(spec.shape)} on ({spec.layout.axes}).",
                fix="Redistribute within one mesh, and keep the shape.",
            )
        for _, op in target.partial:
            check_reducible(spec.dtype, op)
        out.append(target)
    return out


class RedistributeMany(torch.autograd.Function):
    """`apply(target layouts, async_op, *tensors)`, all of one mesh."""

    @staticmethod
    def forward(ctx: Any, targets: tuple[Layout, ...], async_op: bool, *tensors: DTensor) -> Any:
        ctx.layouts, ctx.targets, ctx.async_op = [x._spec.layout for x in tensors], targets, async_op
        ctx.set_materialize_grads(False)
        out = _redistribute_many(targets, async_op, tensors)
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, out, strict=True) if not x.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out: list[Any] = [None] * len(grads)
        given = [i for i, g in enumerate(grads) if g is not None]
        layouts = [(ctx.layouts[i], ctx.targets[i], grads[i]._spec.layout) for i in given]
        targets = tuple(returned_layout(*three) for three in layouts)
        dense = [densify(grads[i], target) for i, target in zip(given, targets, strict=True)]
        if given:
            moved = RedistributeMany.apply(targets, ctx.async_op, *dense)  # type: ignore[no-untyped-call]
            for i, g in zip(given, moved, strict=True):
                out[i] = g
        return (None, None, *out)


def _redistribute_many(
    targets: Sequence[Layout], async_op: bool, tensors: Sequence[DTensor]
) -> tuple[DTensor, ...]:
    """New DTensors in other layouts, beneath autograd."""
    specs, mesh = [x._spec for x in tensors], tensors[0]._spec.mesh
    items = [Item(s.layout, target, s.dtype) for s, target in zip(specs, targets, strict=True)]
    blocks = [x._local_tensor for x in tensors]
    after = [
        Spec(mesh, t, s.dtype, s.shape, contiguous_stride(t.shape))
        for s, t in zip(specs, targets, strict=True)
    ]
    plan = plan_redistribute_many(items)
    stays = [p.source is p.target for p in plan.plans]
    if async_op and not torch.compiler.is_compiling():
        pending = start_many(plan, blocks, mesh)
        if not pending.is_complete:
            return tuple(
                _unmoved(x) if stay else AsyncDTensor(_part(pending, i, x.device), spec)
                for i, (x, spec, stay) in enumerate(zip(tensors, after, stays, strict=True))
            )
        found = pending.wait()
    else:
        found = run_many(plan, blocks, mesh)
    return tuple(
        _unmoved(x) if stay else DTensor(block, spec)
        for x, block, spec, stay in zip(tensors, found, after, stays, strict=True)
    )


def _unmoved(x: DTensor) -> DTensor:
    block = x._local_tensor
    return DTensor(block.view_as(block), x._spec)


def _part(pending: PendingBlocks, index: int, device: torch.device) -> Pending:
    return Pending(lambda: pending.wait()[index], device)


def move_blocks(
    plan: GroupedPlan, blocks: Sequence[Tensor], mesh: DeviceMesh, subject: str = ""
) -> list[Tensor]:
    """Take blocks through a grouped plan, beneath autograd: for engines that own the blocks of their tensors.

    Args:
        plan: the plan.
        blocks: the blocks of this rank.
        mesh: the mesh of the collectives.
        subject: what they are moved for: ranks that move equal blocks for different things are an error.
    """
    return start_moving_blocks(plan, blocks, mesh, subject).wait()


def start_moving_blocks(
    plan: GroupedPlan, blocks: Sequence[Tensor], mesh: DeviceMesh, subject: str = ""
) -> PendingBlocks:
    """Like `move_blocks`, without waiting for the last collective."""
    subjects.append(subject)
    try:
        with below_autograd():
            pending = start_many(plan, blocks, mesh)
    finally:
        subjects.pop()
    return pending if pending.is_complete else PendingBlocks(lambda: _wait(pending))


def _wait(pending: PendingBlocks) -> list[Tensor]:
    with below_autograd():
        return pending.wait()
