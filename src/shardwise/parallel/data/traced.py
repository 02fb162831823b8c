"""Calls of data-parallel modules in compiled code: one gather in the graph, whose gradient is one reduction.

The engine runs hooks and keeps state between calls, which a graph cannot. Here a call gathers the parameters of each of its
groups by the same plan, as part of the graph, and the compiler decides when to gather and what to keep for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of
from shardwise.parallel.data.group import Group
from shardwise.parallel.data.state import State, cast_tensors
from shardwise.parallel.plain import count_plain_as_replicated
from shardwise.parallel.tree import tensors_in
from shardwise.plan.settings import pop_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import move_blocks
from shardwise.torch_internals.graph_calls import call_in_graph, call_while_tracing
from shardwise.torch_internals.graph_values import describe_by
from shardwise.torch_internals.modules import own_parameters
from shardwise.torch_internals.tracing import break_graph

__all__ = ["call_traced"]


def call_traced(state: State, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a data-parallel module with gathered parameters, in code that is being compiled."""
    if not _is_traceable(state):
        break_graph()
    meshes = [t.device_mesh for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)]
    whole = _is_on_whole_mesh(state, meshes)
    stored = []
    for group in state.groups:
        homes = [slot.places[0] for slot in group.slots]
        params: Any = [own_parameters(module)[name] for module, name in homes]
        tensors = _gather(group, whole, params)
        for slot, param, tensor in zip(group.slots, params, tensors, strict=True):
            for module, name in slot.places:
                own_parameters(module)[name] = tensor
                stored.append((module, name, param))
    if state.policy.cast_forward_inputs and state.policy.param_dtype is not None:
        args, kwargs = cast_tensors((args, kwargs), state.policy.param_dtype)
    if whole:
        count_plain_as_replicated()
    try:
        out = fn(*args, **kwargs)
    finally:
        if whole:
            pop_settings()
        for module, name, param in stored:
            own_parameters(module)[name] = param
    return out if state.policy.output_dtype is None else cast_tensors(out, state.policy.output_dtype)


@call_while_tracing
def _is_traceable(state: State) -> bool:
    """Whether calls do no more than gather and reduce: nothing is accumulated, kept in part, hooked or pinned."""
    return all(
        group.reduction.is_usual
        and group.smaller is None
        and not group.is_pinned
        and all(slot.is_plain for slot in group.slots)
        for group in state.groups
    )


@call_while_tracing
def _is_on_whole_mesh(state: State, meshes: Sequence[DeviceMesh]) -> bool:
    """Whether there is data on a mesh that has the data axes, rather than each rank's own."""
    return any(state.axes.intersection(axes_of(mesh).names) for mesh in meshes)


@call_in_graph
def _gather(group: Group, whole: bool, params: list[Tensor]) -> list[Tensor]:
    """The tensors that a group's modules compute with."""
    return list(_Gather.apply(group, whole, *params))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """`apply(group, whether data are on the whole mesh, *stored parameters)`: the tensors to compute with."""

    @staticmethod
    def forward(ctx: Any, group: Group, whole: bool, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.dtypes = group, [p.dtype for p in params]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*params)
        slots = group.slots
        blocks = [slot.block(p) for slot, p in zip(slots, params, strict=True)]
        if not group.is_in_place:
            device = group.mesh.device_type
            blocks = [b.to(device=device, dtype=s.dtype) for s, b in zip(slots, blocks, strict=True)]
            blocks = move_blocks(group.gather_plan(), blocks, group.mesh)
        return tuple(slot.raw(b, whole)[0] for slot, b in zip(slots, blocks, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group: Group = ctx.group
        params = ctx.saved_tensors
        given = {i: g for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[i + 2]}
        out: list[Tensor | None] = [None] * len(grads)
        if given:
            order, finish, _ = group.reduction.start(list(given), given)
            for i, grad in zip(order, finish([params[i] for i in order]), strict=True):
                out[i] = grad
        return (None, None, *out)


def _describe(group: Group) -> str:
    parts = [f"{s.name}: {s.stored} -> {s.computed}, {s.dtype}" for s in group.slots]
    return f"group({group.label}, {group.policy}, {group.reduction.divisor}, {'; '.join(parts)})"


describe_by(Group, _describe)
describe_by(State, lambda state: f"state({state.name})")
