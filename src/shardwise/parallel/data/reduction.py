"""Reducing the gradients of a group: from one that differs along the data axes to the layout of the stored parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import PerRank, lifted, per_rank
from shardwise.layout import Layout
from shardwise.parallel.data.slot import Slot
from shardwise.plan import GroupedPlan, Item, plan_redistribute_many
from shardwise.plan.settings import Decisions, current_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import PendingBlocks, move_blocks, start_moving_blocks

Finish = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""Waits for gradients that are being reduced, and returns them, given the stored parameters."""

__all__ = ["Finish", "Reduction", "buckets_of", "reduction_plan"]


def reduction_plan(slots: Sequence[Slot], dtypes: Sequence[torch.dtype]) -> GroupedPlan:
    """The plan that reduces gradients which are computed from each rank's own data."""
    return plan_redistribute_many(
        Item(slot.pending_gradient(slot.computed, "avg"), slot.stored, dtype)
        for slot, dtype in zip(slots, dtypes, strict=True)
    )


class _Gradient(NamedTuple):
    block: Tensor
    layout: Layout


class Reduction:
    """How the gradients of a group are reduced.

    Attributes:
        reduce_dtype: the dtype to reduce in; None for that of the gradients.
        divisor: the number to divide the sum by; None for the number of ranks with data of their own.
        all_reduce: whether to reduce over the axes that replicate parameters; if not, the partial sums are kept.
        hook: called with the reduced gradients as one flat tensor per dtype, which it may change; None for none.
    """

    def __init__(self, reduce_dtype: torch.dtype | None) -> None:
        self.reduce_dtype = reduce_dtype
        self.divisor: float | None = None
        self.all_reduce = True
        self.hook: Callable[[Tensor], None] | None = None
        self._plans: dict[tuple[object, ...], tuple[GroupedPlan, Decisions]] = {}
        self._kept: dict[int, _Gradient] = {}  # partial sums over the axes that split parameters

    def forget(self) -> None:
        """Drop partial sums."""
        self._kept.clear()

    @property
    def keeps(self) -> list[int]:
        """The slots with partial sums."""
        return list(self._kept)

    def start(
        self, slots: Mapping[int, Slot], grads: Mapping[int, Tensor], label: str
    ) -> tuple[list[int], Finish, PendingBlocks | None]:
        """Begin to reduce gradients; returns the slots that will have one, and what completes those of the stored parameters.

        The order of `grads` must be the same on all ranks. `label` names the group.
        """
        mesh = next(iter(slots.values())).mesh
        before = self._divisor_of_terms(slots, grads)
        if before != 1:
            grads = {i: g / before for i, g in grads.items()}
        kept = {i: self._kept.pop(i) for i in slots if i in self._kept} if self._kept else {}
        plan = None if kept or not self.all_reduce else self._usual_plan(slots, grads)
        if plan is not None:
            order, blocks = list(grads), list(grads.values())
        else:
            given = {i: self._gradient(slots[i], g) for i, g in grads.items()}
            if not self.all_reduce or kept:
                given = self._scattered(slots, given, kept, label)
                if not self.all_reduce:
                    self._kept |= given
                    return [], lambda params: [], None
            plan = plan_redistribute_many(
                Item(g.layout, slots[i].stored, g.block.dtype) for i, g in given.items()
            )
            order, blocks = list(given), [g.block for g in given.values()]
        pending = start_moving_blocks(plan, blocks, mesh, label)
        divisor = None if self.divisor is None else self.divisor / before
        if self.hook is not None:
            pending, divisor = _hooked(pending, self.hook, divisor), None
        return order, _finish([slots[i] for i in order], pending, divisor), pending

    def _divisor_of_terms(self, slots: Mapping[int, Slot], grads: Mapping[int, Tensor]) -> int:
        """What gradients in half precision are divided by before they are added, exactly: their sum could be too large."""
        dtype = self.reduce_dtype or next((g.dtype for g in grads.values()), None)
        if self.divisor is None or dtype is not torch.float16:
            return 1
        ranks = next(iter(slots.values())).layout.data_ranks
        return 1 << (ranks - 1).bit_length()

    def _usual_plan(self, slots: Mapping[int, Slot], grads: Mapping[int, Tensor]) -> GroupedPlan | None:
        """The plan for gradients that are plain tensors of one dtype; None for others."""
        kinds = {(type(g), g.dtype) for g in grads.values()}
        kind, dtype = kinds.pop() if len(kinds) == 1 else (None, None)
        if kind not in (Tensor, PerRank):
            return None
        dtype = self.reduce_dtype or dtype  # they are cast when they are packed
        decisions = current_settings().decisions
        key = (*grads, dtype, self._op)
        found, made_under = self._plans.get(key, (None, None))
        if found is None or made_under is not decisions:
            found = plan_redistribute_many(
                Item(slots[i].pending_gradient(slots[i].computed, self._op), slots[i].stored, dtype)
                for i in grads
            )
            self._plans[key] = found, decisions
        return found

    @property
    def _op(self) -> str:
        return "avg" if self.divisor is None else "sum"

    def _gradient(self, slot: Slot, grad: Tensor) -> _Gradient:
        """The block of a gradient in the dtype to reduce in, and its layout on the group's mesh."""
        layout, block = slot.computed, grad
        if isinstance(grad, DTensor):
            layout, block = lifted(grad.sharding, grad.device_mesh, slot.mesh), grad._local_tensor
        if not isinstance(grad, DTensor) or grad.device_mesh != slot.layout.mesh:
            layout = slot.pending_gradient(layout, self._op)  # each rank computed it from its own data
        elif slot.layout.declares_data:
            whole = slot.data - layout.sharded - {a for a, _ in layout.partial}
            layout = layout.with_partial(dict(layout.partial) | dict.fromkeys(whole, self._op))
        dtype = self.reduce_dtype or block.dtype
        return _Gradient(block if block.dtype is dtype else block.to(dtype), layout)

    def _scattered(
        self,
        slots: Mapping[int, Slot],
        given: Mapping[int, _Gradient],
        before: Mapping[int, _Gradient],
        label: str,
    ) -> dict[int, _Gradient]:
        """Gradients reduced over the axes that split parameters, with the partial sums of earlier passes added."""
        targets = {}
        for i, g in given.items():
            stored = slots[i].stored
            left = {
                a: op for a, op in g.layout.partial if a not in stored.sharded and a in slots[i].replicate
            }
            targets[i] = stored.with_partial(left)
        plan = plan_redistribute_many(Item(g.layout, targets[i], g.block.dtype) for i, g in given.items())
        mesh = next(iter(slots.values())).mesh
        found = move_blocks(plan, [g.block for g in given.values()], mesh, label) if given else []
        out = {i: _Gradient(b, targets[i]) for i, b in zip(given, found, strict=True)}
        for i, kept in before.items():
            if i in out:
                out[i] = _Gradient(out[i].block + kept.block, out[i].layout)
            else:
                out[i] = kept
        return dict(sorted(out.items()))


def _finish(slots: Sequence[Slot], pending: PendingBlocks, divisor: float | None) -> Finish:
    """What completes the reduced gradients of stored parameters."""

    def finish(params: Sequence[Tensor]) -> list[Tensor]:
        blocks: Sequence[Tensor] = pending.wait()
        if divisor is not None:
            blocks = [block / divisor for block in blocks]
        # that of all parameters of the group
        device = getattr(params[0], "_local_tensor", params[0]).device
        dtypes = [p.dtype for p in params]
        if blocks[0].device != device or [b.dtype for b in blocks] != dtypes:
            blocks = [b.to(device=device, dtype=d) for b, d in zip(blocks, dtypes, strict=True)]
        if slots[0].layout.stored_plain and type(blocks[0]) is Tensor:
            return list(blocks)
        return [slot.wrap(b, d) for slot, b, d in zip(slots, blocks, dtypes, strict=True)]

    return finish


def _hooked(pending: PendingBlocks, hook: Callable[[Tensor], None], divisor: float | None) -> PendingBlocks:
    """Blocks with which a hook is called when they have arrived, as one flat tensor per dtype."""

    def finish() -> list[Tensor]:
        out = list(pending.wait())
        for dtype in dict.fromkeys(b.dtype for b in out):
            some = [i for i, b in enumerate(out) if b.dtype is dtype]
            flat = per_rank(_flat, *(out[i] for i in some))
            flat = flat if divisor is None else flat / divisor
            hook(flat)
            for i, part in zip(some, per_rank(_parts, flat, *(out[i] for i in some)), strict=True):
                out[i] = part
        return out

    return PendingBlocks(finish) if not pending.is_complete else PendingBlocks.completed(finish())


def _flat(rank: int, *blocks: Tensor) -> Tensor:
    return torch.cat([b.reshape(-1) for b in blocks])


def _parts(rank: int, flat: Tensor, *blocks: Tensor) -> list[Tensor]:
    parts = flat.split([b.numel() for b in blocks])
    return [part.view(b.shape) for part, b in zip(parts, blocks, strict=True)]


def buckets_of(slots: Sequence[Slot], most: int | None) -> list[list[int]]:
    """The slots in one bucket; or from the last to the first, in buckets of up to so many bytes."""
    if most is None:
        return [list(range(len(slots)))]
    out: list[list[int]] = [[]]
    size = 0
    for i in reversed(range(len(slots))):
        nbytes = slots[i].param.nbytes
        if out[-1] and size + nbytes > most:
            out.append([])
            size = 0
        out[-1].append(i)
        size += nbytes
    return out
