"""The gradients of a group: accumulated on each rank, or reduced together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import on_mesh
from shardwise.layout import block_shape
from shardwise.parallel.data.agreement import compare_ranks
from shardwise.parallel.data.connect import joined
from shardwise.parallel.data.memory import compute_dtype
from shardwise.parallel.data.passes import Backward, Pass, current_backward_pass, engine
from shardwise.parallel.data.policy import MixedPrecisionPolicy
from shardwise.parallel.data.reduction import Finish, Reduction, reduction_plan
from shardwise.parallel.data.slot import Slot
from shardwise.plan import GroupedPlan

__all__ = ["GroupGradients"]


class GroupGradients(ABC):
    """What a `Group` does with gradients; its attributes are described there."""

    policy: MixedPrecisionPolicy
    slots: list[Slot]
    mesh: DeviceMesh
    buckets: list[list[int]]
    reduction: Reduction
    sync: bool
    reshard_after_backward: bool
    reduce_unused: bool
    most_reductions: int
    name: str
    label: str
    _accumulated: dict[int, Tensor]
    _pass: Pass | None

    @abstractmethod
    def free(self) -> None:
        """Free the gathered blocks, and let the modules have the stored parameters."""

    @abstractmethod
    def _take_part(self, backward: Backward) -> None:
        """Be told when this backward pass ends."""

    def reduction_plans(self) -> list[GroupedPlan]:
        """The plans that reduce the gradients of all parameters that have one, in each bucket."""
        out = []
        for bucket in self.buckets:
            slots = [self.slots[i] for i in bucket if self.slots[i].param.requires_grad]
            dtypes = [
                self.policy.reduce_dtype or compute_dtype(slot, self.policy.param_dtype) for slot in slots
            ]
            if slots:
                out.append(reduction_plan(slots, dtypes))
        return out

    def reduce(self, slots: Sequence[int], grads: Sequence[Tensor | None]) -> Finish | None:
        """Begin to reduce the gradients of some slots, or accumulate them; returns what completes them."""
        backward = current_backward_pass()
        if backward is not None:
            self._take_part(backward)
        given = {
            i: g.to_dense() if g.is_sparse else g for i, g in zip(slots, grads, strict=True) if g is not None
        }
        if not self.sync or self._accumulated:
            for i, grad in given.items():
                self._accumulate(i, grad)
            given = (
                {i: self._accumulated.pop(i) for i in slots if i in self._accumulated} if self.sync else {}
            )
        if self.reshard_after_backward:
            self.free()
        if not self.sync:
            return None
        if self.reduce_unused:
            given = {i: given[i] if i in given else self._zero(i) for i in slots}
        reduced, finish = self._start_reduction(slots, given)
        return finish if reduced == slots else lambda params: _spread(slots, params, reduced, finish)

    def _accumulate(self, i: int, grad: Tensor) -> None:
        before = self._accumulated.get(i)
        dtype = self.policy.reduce_dtype
        if not self.sync and dtype is not None and grad.dtype is not dtype:
            grad = grad.to(dtype)  # accumulated in the dtype that they are reduced in
        if before is not None:
            grad = before + (grad if grad.dtype is before.dtype else grad.to(before.dtype))
        self._accumulated[i] = grad

    def _zero(self, i: int) -> Tensor:
        """A gradient of zero. Nothing is gathered for it: the ranks that have a gradient would not take part."""
        slot, whole = self.slots[i], self._pass is not None and self._pass.on_whole_mesh
        dtype, device = compute_dtype(slot, self.policy.param_dtype), self.mesh.device_type
        block = on_mesh(
            self.mesh, lambda c: torch.zeros(block_shape(slot.computed, c), dtype=dtype, device=device)
        )
        return joined(slot.raw(block, whole), self.mesh)

    def _start_reduction(self, slots: Sequence[int], given: dict[int, Tensor]) -> tuple[list[int], Finish]:
        """Begin to reduce the gradients of some slots, with the partial sums that are kept of them."""
        if not given and not any(i in slots for i in self.reduction.keeps):
            return [], lambda params: []
        compare_ranks(self.mesh, f"reduce {len(given)} gradients of {self.label}")
        reductions = engine()
        reductions.end_reductions(self.most_reductions - 1)
        reduced, finish, pending = self.reduction.start({i: self.slots[i] for i in slots}, given, self.label)
        if pending is not None and not pending.is_complete:
            reductions.running.append(pending)
        return reduced, finish

    def reduce_accumulated(self) -> None:
        """Reduce gradients of earlier passes whose parameters were not used in the last one."""
        if self.sync and (self._accumulated or (self.reduction.all_reduce and self.reduction.keeps)):
            given, self._accumulated = dict(sorted(self._accumulated.items())), {}
            reduced, finish = self._start_reduction(range(len(self.slots)), given)
            params = [self.slots[i].param for i in reduced]
            for param, grad in zip(params, finish(params) if params else (), strict=True):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad + grad


def _spread(
    slots: Sequence[int], params: Sequence[Tensor], reduced: Sequence[int], finish: Finish
) -> list[Tensor | None]:
    """The gradients of slots of which only some have one."""
    stored = dict(zip(slots, params, strict=True))
    found = dict(zip(reduced, finish([stored[i] for i in reduced]) if reduced else (), strict=True))
    return [found.get(i) for i in slots]
