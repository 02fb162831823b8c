"""The autograd functions that connect gathered tensors with the stored parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, is_simulated, members_of
from shardwise.parallel.data.passes import current_backward_pass
from shardwise.parallel.data.reduction import Finish
from shardwise.parallel.data.slot import Slot
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import (
    PROBE,
    accumulates_everywhere,
    current_backward,
    is_hooked,
    run_at_the_end,
    run_when_ready,
)

__all__ = ["Reduce", "connected_tensors", "joined"]

Reduce = Callable[[Sequence[int], Sequence[Tensor | None]], Finish | None]
"""Begins to reduce the gradients of the slots with these indices, and returns what completes them."""


def connected_tensors(
    slots: Mapping[int, Slot],
    params: Sequence[Tensor],
    blocks: Sequence[Tensor],
    whole: bool,
    reduce: Reduce,
) -> dict[int, Tensor]:
    """The tensors to compute with, of the gathered blocks of slots whose gradients are reduced together."""
    reduced: dict[int, Finish | None] = {}  # by backward pass, on the way from one node to the other
    token = _Accumulate.apply(reduced, PROBE, *params)  # type: ignore[no-untyped-call]
    run_at_the_end(token)
    mesh = next(iter(slots.values())).mesh
    raw = [slot.raw(blocks[i], whole) for i, slot in slots.items()]
    found = _Unshard.apply(reduced, list(slots), raw, mesh, reduce, token)  # type: ignore[no-untyped-call]
    run_when_ready(found[0])
    if not is_simulated():
        return dict(zip(slots, found, strict=True))
    rest = iter(found)
    return {i: joined([next(rest) for _ in some], mesh) for i, some in zip(slots, raw, strict=True)}


def joined(raw: Sequence[Tensor], mesh: DeviceMesh) -> Tensor:
    """The tensor that a module computes with, of what `Slot.raw` returned."""
    if len(raw) == 1 and (type(raw[0]) is DTensor or not is_simulated()):
        return raw[0]
    return PerRank(dict(zip(members_of(mesh), raw, strict=True)))


def _joined_grads(grads: Sequence[Tensor | None], mesh: DeviceMesh) -> Tensor | None:
    """The gradient of such a tensor; a rank without a gradient counts as zero."""
    given = next((g for g in grads if g is not None), None)
    if given is None:
        return None
    return joined([torch.zeros_like(given) if g is None else g for g in grads], mesh)


class _Accumulate(torch.autograd.Function):
    """`apply(reduced, probe, *stored parameters)`: a token. Its backward waits for the gradients of the parameters.

    It runs when the rest of the backward pass has run, so that the reductions overlap with it.
    """

    @staticmethod
    def forward(ctx: Any, reduced: dict[int, Finish | None], probe: Tensor, *params: Tensor) -> Tensor:
        ctx.reduced, ctx.params = reduced, params
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None) -> Any:
        finish, params = ctx.reduced.pop(current_backward(), None), ctx.params
        if finish is None:
            return (None,) * (len(params) + 2)
        backward = current_backward_pass()
        if backward is None or not accumulates_everywhere() or not all(map(_is_bare, params)):
            return (None, None, *finish(params))
        # what autograd would do, when it has passed by all parameters, and without a call of the dispatcher for each
        backward.at_end(finish, lambda: _set_grads(params, finish(params)))
        return (None,) * (len(params) + 2)


def _is_bare(param: Tensor) -> bool:
    return param.grad is None and not is_hooked(param)


def _set_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            # another group may have set it since, for a tied parameter
            param.grad = grad if param.grad is None else param.grad.detach() + grad


class _Unshard(torch.autograd.Function):
    """`apply(reduced, indices of slots, new tensors of each, mesh, reduce, token)`: those tensors, to compute with."""

    @staticmethod
    def forward(
        ctx: Any,
        reduced: dict[int, Finish | None],
        slots: list[int],
        raw: Sequence[Sequence[Tensor]],
        mesh: DeviceMesh,
        reduce: Reduce,
        token: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.reduced, ctx.slots, ctx.mesh, ctx.reduce = reduced, slots, mesh, reduce
        ctx.set_materialize_grads(False)
        ctx.counts = [len(some) for some in raw]
        return tuple([t for some in raw for t in some])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if is_simulated():
            rest = iter(grads)
            grads = tuple(_joined_grads([next(rest) for _ in range(n)], ctx.mesh) for n in ctx.counts)
        ctx.reduced[current_backward()] = ctx.reduce(ctx.slots, grads)
        return None, None, None, None, None, torch.empty(0)
