"""The autograd functions that connect gathered tensors with the stored parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import is_simulated
from shardwise.parallel.data.passes import current_backward_pass
from shardwise.parallel.data.reduction import Finish
from shardwise.parallel.data.slot import Slot, joined
from shardwise.torch_internals.autograd import (
    PROBE,
    accumulates_everywhere,
    are_hooked,
    run_when_ready,
)

__all__ = ["WeakReduce", "connected_tensors"]


class _Reducer(Protocol):
    """A group of parameters."""

    label: str

    def reduce(self, slots: Sequence[int], grads: Sequence[Tensor | None]) -> Finish | None:
        """Begin to reduce the gradients of the slots with these indices, and return what completes them."""


class WeakReduce:
    """The `reduce` of a group, for graphs that the group itself keeps; results of its modules keep the group."""

    def __init__(self, group: _Reducer) -> None:
        self._group, self._label = weakref.ref(group), group.label

    def __call__(self, slots: Sequence[int], grads: Sequence[Tensor | None]) -> Finish | None:
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"A backward pass reached the parameters of {self._label}, which no longer exists.\n"
                "  why: The module was deleted between its forward and its backward pass.\n"
                "  fix: Keep the model until backward() has run."
            )
        return group.reduce(slots, grads)


def connected_tensors(
    slots: Mapping[int, Slot],
    params: Sequence[Tensor],
    blocks: Sequence[Tensor],
    whole: bool,
    reduce: WeakReduce,
) -> dict[int, Tensor]:
    """The tensors to compute with, of the gathered blocks of slots whose gradients are reduced together."""
    mesh = next(iter(slots.values())).mesh
    raw = [slot.raw(blocks[i], whole) for i, slot in slots.items()]
    found = _Unshard.apply(list(slots), raw, mesh, reduce, PROBE, *params)  # type: ignore[no-untyped-call]
    run_when_ready(found[0])
    if not is_simulated():
        return dict(zip(slots, found, strict=True))
    rest = iter(found)
    return {i: joined([next(rest) for _ in some], mesh) for i, some in zip(slots, raw, strict=True)}


def _joined_grads(grads: Sequence[Tensor | None], mesh: DeviceMesh) -> Tensor | None:
    """The gradient of such a tensor; a rank without a gradient counts as zero."""
    given = next((g for g in grads if g is not None), None)
    if given is None:
        return None
    return joined([torch.zeros_like(given) if g is None else g for g in grads], mesh)


def _set_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """What autograd does with the gradients of leaves, without a call of the dispatcher for each."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.add_(grad)


class _Unshard(torch.autograd.Function):
    """`apply(indices of slots, new tensors of each, mesh, reduce, probe, *stored parameters)`: those tensors, to compute with.

    The gradients of the stored parameters are set when the backward pass ends, so that the reductions overlap with it. If others
    are to have them, such as hooks or `torch.autograd.grad`, it waits for them and returns them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slots: list[int],
        raw: Sequence[Sequence[Tensor]],
        mesh: DeviceMesh,
        reduce: WeakReduce,
        probe: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.slots, ctx.mesh, ctx.reduce, ctx.params = slots, mesh, reduce, params
        ctx.set_materialize_grads(False)
        ctx.counts = [len(some) for some in raw]
        return tuple([t for some in raw for t in some])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        run = _backward_once if torch.is_grad_enabled() else _backward
        return run(ctx, *grads)


def _backward(ctx: Any, *grads: Any) -> Any:
    if is_simulated():
        rest = iter(grads)
        grads = tuple(_joined_grads([next(rest) for _ in range(n)], ctx.mesh) for n in ctx.counts)
    finish, params = ctx.reduce(ctx.slots, grads), ctx.params
    backward = current_backward_pass()
    if finish is None or backward is None:
        return (None,) * (5 + len(params))
    if not accumulates_everywhere() or are_hooked(params):
        return (*(None,) * 5, *finish(params))
    backward.at_end(finish, lambda: _set_grads(params, finish(params)))
    return (None,) * (5 + len(params))


_backward_once: Callable[..., Any] = once_differentiable(_backward)
