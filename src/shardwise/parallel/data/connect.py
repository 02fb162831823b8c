"""The autograd functions that connect gathered tensors with the stored parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.parallel.data.slot import Slot
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import current_backward, run_at_the_end, run_when_ready

__all__ = ["Finish", "Reduce", "connected_tensors"]

Finish = Callable[[], DTensor]
"""Waits for a gradient that is being reduced, and returns it."""
Reduce = Callable[[dict[int, Tensor | None]], list[Finish | None]]
"""Begins to reduce the gradients of some slots, and returns what completes those of the stored parameters."""


def connected_tensors(
    slots: Mapping[int, Slot],
    params: Sequence[DTensor],
    blocks: Sequence[Tensor],
    whole: bool,
    reduce: Reduce,
) -> dict[int, Tensor]:
    """The tensors to compute with, of the gathered blocks of slots whose gradients are reduced together."""
    reduced: dict[int, list[Finish | None]] = {}  # by backward pass, on the way from one node to the other
    token = _Accumulate.apply(reduced, *params)  # type: ignore[no-untyped-call]
    run_at_the_end(token)
    listed = list(slots.values())
    raw = [slot.raw(blocks[i], whole) for i, slot in slots.items()]
    found = _Unshard.apply(reduced, slots, raw, reduce, token)  # type: ignore[no-untyped-call]
    run_when_ready(found[0])
    if len(found) == len(raw):
        return {i: slot.joined([t]) for (i, slot), t in zip(slots.items(), found, strict=True)}
    rest = iter(found)
    joined = [slot.joined([next(rest) for _ in some]) for slot, some in zip(listed, raw, strict=True)]
    return dict(zip(slots, joined, strict=True))


class _Accumulate(torch.autograd.Function):
    """`apply(reduced, *stored parameters)`: a token. Its backward waits for the gradients of the parameters.

    It runs when the rest of the backward pass has run, so that the reductions overlap with it.
    """

    @staticmethod
    def forward(ctx: Any, reduced: dict[int, list[Finish | None]], *params: DTensor) -> Tensor:
        ctx.reduced, ctx.count = reduced, len(params)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None) -> Any:
        found = ctx.reduced.pop(current_backward(), None) or [None] * ctx.count
        return (None, *[None if finish is None else finish() for finish in found])


class _Unshard(torch.autograd.Function):
    """`apply(reduced, slots, new tensors of each, reduce, token)`: those tensors, to compute with."""

    @staticmethod
    def forward(
        ctx: Any,
        reduced: dict[int, list[Finish | None]],
        slots: Mapping[int, Slot],
        raw: Sequence[Sequence[Tensor]],
        reduce: Reduce,
        token: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.reduced, ctx.slots, ctx.reduce = reduced, slots, reduce
        ctx.set_materialize_grads(False)
        ctx.counts = [len(some) for some in raw]
        return tuple([t for some in raw for t in some])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if len(grads) == len(ctx.counts):
            pairs = zip(ctx.slots.items(), grads, strict=True)
            found = {i: None if g is None else slot.joined([g]) for (i, slot), g in pairs}
        else:
            rest = iter(grads)
            found = {
                i: slot.joined_grads([next(rest) for _ in range(count)])
                for (i, slot), count in zip(ctx.slots.items(), ctx.counts, strict=True)
            }
        ctx.reduced[current_backward()] = ctx.reduce(found)
        return None, None, None, None, torch.empty(0)
