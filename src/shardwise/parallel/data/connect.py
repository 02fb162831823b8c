"""The autograd functions that connect gathered tensors with the stored parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.parallel.data.slot import Slot
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import run_at_the_end, run_when_ready

__all__ = ["Reduce", "connected_tensors"]

Reduce = Callable[[dict[int, Tensor | None]], list[DTensor | None]]
"""Reduces the gradients of some slots and returns those of the stored parameters, which may have to be waited for."""


def connected_tensors(
    slots: Mapping[int, Slot], blocks: Sequence[Tensor], whole: bool, reduce: Reduce
) -> dict[int, Tensor]:
    """The tensors to compute with, of the gathered blocks of slots whose gradients are reduced together."""
    stored = _Accumulate.apply(*(slot.param for slot in slots.values()))  # type: ignore[no-untyped-call]
    run_at_the_end(stored[0])
    raw = list(_Unshard.apply(dict(slots), whole, tuple(blocks), reduce, *stored))  # type: ignore[no-untyped-call]
    run_when_ready(raw[0])
    out = {}
    for i, slot in slots.items():
        count = len(slot.raw(blocks[i], whole))
        out[i] = slot.joined(raw[:count])
        del raw[:count]
    return out


class _Accumulate(torch.autograd.Function):
    """`apply(*stored parameters)`: the same tensors. Its backward waits for gradients that are being reduced.

    It runs when the rest of the backward pass has run, so that the reductions overlap with it.
    """

    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(DTensor(p._local_tensor, p._spec) for p in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(None if g is None else DTensor(g._local_tensor, g._spec) for g in grads)


class _Unshard(torch.autograd.Function):
    """`apply(slots, on the whole mesh, gathered blocks, reduce, *stored parameters)`: the tensors to compute with."""

    @staticmethod
    def forward(
        ctx: Any,
        slots: Mapping[int, Slot],
        whole: bool,
        blocks: Sequence[Tensor],
        reduce: Reduce,
        *stored: DTensor,
    ) -> tuple[Tensor, ...]:
        ctx.slots, ctx.reduce = slots, reduce
        ctx.set_materialize_grads(False)
        raw = [slot.raw(blocks[i], whole) for i, slot in slots.items()]
        ctx.counts = [len(some) for some in raw]
        return tuple(t for some in raw for t in some)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rest = iter(grads)
        found: dict[int, Tensor | None] = {}
        for (i, slot), count in zip(ctx.slots.items(), ctx.counts, strict=True):
            found[i] = slot.joined_grads([next(rest) for _ in range(count)])
        return (None, None, None, None, *ctx.reduce(found))
