"""The gradients of a group: accumulated on each rank, or reduced together to the layouts of the stored parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import PerRank, lifted, on_mesh, per_rank
from shardwise.layout import Layout, block_shape
from shardwise.parallel.agreement import compare_ranks
from shardwise.parallel.data.passes import engine
from shardwise.parallel.data.slot import Slot, joined
from shardwise.plan import GroupedPlan, Item, plan_redistribute_many
from shardwise.plan.settings import Decisions, current_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import PendingBlocks, move_blocks, start_moving_blocks

__all__ = ["Finish", "Reduction", "buckets_of"]

Finish = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""Waits for gradients that are being reduced, and returns them, given the stored parameters."""


_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


class _Gradient(NamedTuple):
    block: Tensor
    layout: Layout


class Reduction:
    """How the gradients of a group are reduced.

    Attributes:
        label: the name of the group in messages.
        sync: whether gradients are reduced; if not, they are accumulated on each rank.
        reduce_unused: whether parameters without a gradient on this rank count as having a gradient of zero.
        divisor: the number to divide the sum by; None for the number of ranks with data of their own.
        all_reduce: whether to reduce over the axes that replicate parameters; if not, the partial sums are kept.
        hook: called with the reduced gradients as one flat tensor per dtype, which it may change; None for none.
        most: the number of groups whose gradients may be reduced at the same time; each holds its unreduced gradients.
    """

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype | None, is_in_place: bool) -> None:
        """`dtype`: to reduce in, None for that of the gradients; `is_in_place`: parameters are computed with as they are stored."""
        self.label = ""
        self._slots, self._mesh, self._dtype = slots, slots[0].mesh, dtype
        self._keeps_dtype = is_in_place and dtype is None
        self.sync = self.all_reduce = True
        self.reduce_unused = False
        self.divisor: float | None = None
        self.hook: Callable[[Tensor], None] | None = None
        self.most = 1
        self._plans: dict[tuple[object, ...], tuple[GroupedPlan, Decisions]] = {}
        self.forget()

    def of_copies(self, slots: Sequence[Slot]) -> Reduction:
        """The same for the copied slots of a copied group."""
        out = copy.copy(self)
        out._slots = slots
        out.forget()
        return out

    def forget(self) -> None:
        """Drop gradients that are not reduced, or not over all axes."""
        self._accumulated: dict[int, Tensor] = {}
        self._kept: dict[int, _Gradient] = {}  # partial sums over the axes that split parameters

    @property
    def is_usual(self) -> bool:
        """Whether gradients are reduced as they are computed: nothing is accumulated, kept, hooked or added."""
        return (
            self.sync and self.all_reduce and self.hook is None and not self._kept and not self.reduce_unused
        )

    def plans(self, buckets: Sequence[Sequence[int]]) -> list[GroupedPlan]:
        """The plans that reduce the gradients of all parameters that have one, in each bucket."""
        trained = [[self._slots[i] for i in some if self._slots[i].param.requires_grad] for some in buckets]
        return [
            self._plan(slots, [self._dtype or s.dtype for s in slots], "avg") for slots in trained if slots
        ]

    def _plan(self, slots: Sequence[Slot], dtypes: Sequence[torch.dtype], op: str) -> GroupedPlan:
        return plan_redistribute_many(
            Item(s.pending_gradient(s.computed, op), s.stored, d) for s, d in zip(slots, dtypes, strict=True)
        )

    # ---- what a backward pass does

    def reduce(self, slots: Sequence[int], grads: Sequence[Tensor | None], whole: bool) -> Finish | None:
        """Begin to reduce the gradients of some slots, or accumulate them; returns what completes them.

        `whole`: the data are DTensors on the whole mesh.
        """
        given = {
            i: g.to_dense() if g.is_sparse else g for i, g in zip(slots, grads, strict=True) if g is not None
        }
        if not self.sync or self._accumulated:
            for i, grad in given.items():
                self._accumulate(i, grad)
            if not self.sync:
                return None
            given = {i: self._accumulated.pop(i) for i in slots if i in self._accumulated}
        if self.reduce_unused:
            given = {i: given[i] if i in given else self._zero(i, whole) for i in slots}
        reduced, finish = self._start_in_turn(slots, given)
        return finish if reduced == slots else lambda params: _spread(slots, params, reduced, finish)

    def reduce_accumulated(self) -> None:
        """Reduce gradients of earlier passes whose parameters were not used in the last one."""
        if self.sync and (self._accumulated or (self.all_reduce and self._kept)):
            given, self._accumulated = dict(sorted(self._accumulated.items())), {}
            reduced, finish = self._start_in_turn(range(len(self._slots)), given)
            params = [self._slots[i].param for i in reduced]
            for param, grad in zip(params, finish(params) if params else (), strict=True):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad + grad

    def _accumulate(self, i: int, grad: Tensor) -> None:
        before = self._accumulated.get(i)
        if not self.sync and self._dtype is not None and grad.dtype is not self._dtype:
            grad = grad.to(self._dtype)  # accumulated in the dtype that they are reduced in
        if before is not None:
            grad = before + (grad if grad.dtype is before.dtype else grad.to(before.dtype))
        self._accumulated[i] = grad

    def _zero(self, i: int, whole: bool) -> Tensor:
        """A gradient of zero. Nothing is gathered for it: the ranks that have a gradient would not take part."""
        slot, device = self._slots[i], self._mesh.device_type
        block = on_mesh(
            self._mesh, lambda c: torch.zeros(block_shape(slot.computed, c), dtype=slot.dtype, device=device)
        )
        return joined(slot.raw(block, whole), self._mesh)

    def _start_in_turn(
        self, slots: Sequence[int], given: Mapping[int, Tensor]
    ) -> tuple[Sequence[int], Finish]:
        """`start`, after waiting for reductions of other groups, if there are too many."""
        if not given and not any(i in slots for i in self._kept):
            return [], lambda params: []
        compare_ranks(self._mesh, f"reduce {len(given)} gradients of {self.label}")
        running = engine()
        running.end_reductions(self.most - 1)
        reduced, finish, pending = self.start(slots, given)
        if pending is not None and not pending.is_complete:
            running.running.append(pending)
        return reduced, finish

    # ---- one reduction

    def start(
        self, slots: Sequence[int], grads: Mapping[int, Tensor]
    ) -> tuple[Sequence[int], Finish, PendingBlocks | None]:
        """Begin to reduce gradients; returns the slots that will have one, and what completes those of the stored parameters.

        The order of `grads` must be the same on all ranks.
        """
        before = self._divisor_of_terms(grads)
        if before != 1:
            grads = {i: g / before for i, g in grads.items()}
        kept = {i: self._kept.pop(i) for i in slots if i in self._kept} if self._kept else {}
        plan = None if kept or not self.all_reduce else self._usual_plan(grads)
        if plan is not None:
            order, blocks = slots if len(grads) == len(slots) else list(grads), list(grads.values())
        else:
            given = {i: self._gradient(self._slots[i], g) for i, g in grads.items()}
            if not self.all_reduce or kept:
                given = self._scattered(given, kept)
                if not self.all_reduce:
                    self._kept |= given
                    return [], lambda params: [], None
            plan = plan_redistribute_many(
                Item(g.layout, self._slots[i].stored, g.block.dtype) for i, g in given.items()
            )
            order, blocks = list(given), [g.block for g in given.values()]
        pending = start_moving_blocks(plan, blocks, self._mesh, self.label)
        divisor = None if self.divisor is None else self.divisor / before
        if self.hook is not None:
            pending, divisor = _hooked(pending, self.hook, divisor), None
        return order, self._finish([self._slots[i] for i in order], pending, divisor), pending

    @property
    def _op(self) -> str:
        return "avg" if self.divisor is None else "sum"

    def _divisor_of_terms(self, grads: Mapping[int, Tensor]) -> int:
        """What gradients in half precision are divided by before they are added, exactly: their sum could be too large."""
        if self.divisor is None:
            return 1  # the plan does so for a mean
        dtype = self._dtype or next((g.dtype for g in grads.values()), None)
        return 1 << (self._slots[0].layout.data_ranks - 1).bit_length() if dtype is torch.float16 else 1

    def _usual_plan(self, grads: Mapping[int, Tensor]) -> GroupedPlan | None:
        """The plan for gradients that are plain tensors of one dtype; None for others."""
        kinds, dtypes = set(map(type, grads.values())), set(map(_dtype_of, grads.values()))
        if len(dtypes) != 1 or (kinds != {Tensor} and kinds != {PerRank}):
            return None
        dtype = self._dtype or dtypes.pop()  # they are cast when they are packed
        decisions = current_settings().decisions
        key = (*grads, dtype, self.divisor is None)
        found, made_under = self._plans.get(key, (None, None))
        if found is None or made_under is not decisions:
            found = self._plan([self._slots[i] for i in grads], [dtype] * len(grads), self._op)
            self._plans[key] = found, decisions
        return found

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
        dtype = self._dtype or block.dtype
        return _Gradient(block if block.dtype is dtype else block.to(dtype), layout)

    def _scattered(
        self, given: Mapping[int, _Gradient], before: Mapping[int, _Gradient]
    ) -> dict[int, _Gradient]:
        """Gradients reduced over the axes that split parameters, with the partial sums of earlier passes added."""
        targets = {}
        for i, g in given.items():
            stored, replicate = self._slots[i].stored, self._slots[i].replicate
            left = {a: op for a, op in g.layout.partial if a not in stored.sharded and a in replicate}
            targets[i] = stored.with_partial(left)
        plan = plan_redistribute_many(Item(g.layout, targets[i], g.block.dtype) for i, g in given.items())
        blocks = [g.block for g in given.values()]
        found = move_blocks(plan, blocks, self._mesh, self.label) if given else []
        out = dict(before)
        for i, block in zip(given, found, strict=True):
            out[i] = _Gradient(block + before[i].block if i in before else block, targets[i])
        return dict(sorted(out.items()))

    def _finish(self, slots: Sequence[Slot], pending: PendingBlocks, divisor: float | None) -> Finish:
        """What completes the reduced gradients of stored parameters."""

        def finish(params: Sequence[Tensor]) -> list[Tensor]:
            blocks: Sequence[Tensor] = pending.wait()
            if divisor is not None:
                blocks = [block / divisor for block in blocks]
            if not self._keeps_dtype:
                # the device of one is that of all parameters of the group
                device, dtypes = (
                    getattr(params[0], "_local_tensor", params[0]).device,
                    [p.dtype for p in params],
                )
                if blocks[0].device != device or [b.dtype for b in blocks] != dtypes:
                    blocks = [b.to(device=device, dtype=d) for b, d in zip(blocks, dtypes, strict=True)]
            if slots[0].layout.stored_plain and type(blocks[0]) is Tensor:
                return list(blocks)
            return [slot.wrap(b, b.dtype) for slot, b in zip(slots, blocks, strict=True)]

        return finish


def _spread(
    slots: Sequence[int], params: Sequence[Tensor], reduced: Sequence[int], finish: Finish
) -> list[Tensor | None]:
    """The gradients of slots of which only some have one."""
    stored = dict(zip(slots, params, strict=True))
    found = dict(zip(reduced, finish([stored[i] for i in reduced]) if reduced else (), strict=True))
    return [found.get(i) for i in slots]


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
