"""`explain`: the layouts of a data-parallel module, and the bytes that a training step sends and holds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.layout import Layout, block_shape
from shardwise.parallel.data.group import Group
from shardwise.parallel.data.state import State, state_of
from shardwise.plan import GroupedPlan

__all__ = ["Explanation", "GroupTraffic", "explain"]


@dataclass(frozen=True)
class GroupMemory:
    """The bytes of a group's parts, on the rank that has the most.

    Attributes:
        sent: the stored blocks as they are sent to be gathered.
        gathered: the gathered blocks.
        gradients: the unreduced gradients of each bucket.
        packed: each bucket as it is sent.
        reduced: the gradients of each bucket after it; an all-reduce leaves them where they were packed.
        is_in_place: whether it does.
        is_kept: whether the gathered blocks stay until the backward pass.
        is_freed: whether they are freed after it.
    """

    sent: int
    gathered: int
    gradients: tuple[int, ...]
    packed: tuple[int, ...]
    reduced: tuple[int, ...]
    is_in_place: bool
    is_kept: bool
    is_freed: bool

    @property
    def arriving(self) -> int:
        """What a gather holds that is under way."""
        return self.sent + self.gathered


@dataclass(frozen=True)
class GroupTraffic:
    """What one group sends in a training step of one forward and one backward pass.

    Attributes:
        name: the module.
        parameters: the number of parameters.
        layouts: stored, computed and gradient layouts, each with the number of parameters that have them.
        gather: the plan of a gather.
        again: the plan of the gather for the backward pass; None if there is none.
        reduce: the plans that reduce gradients, one for each bucket.
        ranks: the number of ranks of the mesh.
        memory: what its parts take on the rank that has the most.
    """

    name: str
    parameters: int
    layouts: tuple[tuple[str, int], ...]
    gather: GroupedPlan
    again: GroupedPlan | None
    reduce: tuple[GroupedPlan, ...]
    ranks: int
    memory: GroupMemory

    @property
    def bytes(self) -> int:
        """The bytes that all ranks of the mesh send in a step."""
        return sum(plan.bytes for plan in (*self.gathers, *self.reduce))

    @property
    def collectives(self) -> int:
        """The number of collectives in a step."""
        return sum(plan.collectives for plan in (*self.gathers, *self.reduce))

    @property
    def gathers(self) -> tuple[GroupedPlan, ...]:
        """The plans of all gathers in a step."""
        return (self.gather,) if self.again is None else (self.gather, self.again)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Print it."""

    groups: tuple[GroupTraffic, ...]

    @property
    def bytes_per_rank(self) -> float:
        """The bytes that a rank sends in a step, on average over the ranks."""
        return sum(g.bytes / g.ranks for g in self.groups)

    @property
    def collectives(self) -> int:
        """The number of collectives in a step."""
        return sum(g.collectives for g in self.groups)

    @property
    def peak_bytes(self) -> int:
        """The bytes that a rank holds at most in a step, beyond stored parameters and activations."""
        every = [(g.memory, g.again is not None) for g in self.groups]
        # the first module is the outermost: its own parameters are assumed to be used last
        forward = [*every[1:], *every[:1]]
        most = held = 0
        for (group, _), following in zip(forward, [*forward[1:], None], strict=True):
            ahead = 0 if following is None else following[0].arriving
            most = max(most, held + 2 * group.gathered, held + group.gathered + ahead)
            held += group.gathered if group.is_kept else 0
        backward = forward[::-1]
        for (group, is_gathered), following in zip(backward, [*backward[1:], None], strict=True):
            ahead = 0 if following is None or not following[1] else following[0].arriving
            again = group.gathered if is_gathered else 0
            for gradients, packed, reduced in zip(group.gradients, group.packed, group.reduced, strict=True):
                freed = group.gathered if group.is_kept and group.is_freed else 0
                extra = packed if group.is_in_place else packed + reduced
                most = max(most, held + again + gradients + ahead, held - freed + gradients + extra + ahead)
                held += packed if group.is_in_place else reduced
            held -= group.gathered if group.is_kept and group.is_freed else 0
        return most

    def __str__(self) -> str:
        lines = []
        for g in self.groups:
            per_rank = g.bytes / g.ranks
            lines.append(f"{g.name}: {g.parameters} parameters, {per_rank:,.0f} B per rank and step")
            for plan, count in Counter(g.gathers).items():
                lines.append(f"  {count} × gather   {plan.bytes / g.ranks:,.0f} B")
            reduced = sum(plan.bytes for plan in g.reduce) / g.ranks
            lines.append(f"  {len(g.reduce)} × reduce   {reduced:,.0f} B")
            lines += [
                f"  {text}" + (f"   ({count} parameters)" if count > 1 else "") for text, count in g.layouts
            ]
        total = f"total: {self.bytes_per_rank:,.0f} B per rank and step, {self.collectives} collectives"
        peak = f"peak: {self.peak_bytes:,} B of memory per rank, beyond stored parameters and activations"
        return "\n".join([*lines, total, peak])


def explain(module: nn.Module) -> Explanation:
    """The groups of a data-parallel model, their layouts, and what a training step sends and holds, as the plans predict it.

    Args:
        module: the outermost data-parallel module.

    Returns:
        An `Explanation`, which prints as a table. It is of one forward and one backward pass in which each module is
        called once. After a first step it knows which groups the backward pass gathers.

    Raises:
        ValueError: nothing in the module is data-parallel.

    Nothing is communicated.

    >>> import torch, shardwise as sw
    >>> from shardwise.parallel import explain, fully_shard
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ...     print(explain(fully_shard(torch.nn.Linear(4, 6), mesh=mesh)))
    Linear: 2 parameters, 120 B per rank and step
      1 × gather   60 B
      1 × reduce   60 B
      stored [6:dp, 4], computed [6, 4], gradient [6, 4] P(dp,avg) -> [6:dp, 4]
      stored [6:dp], computed [6], gradient [6] P(dp,avg) -> [6:dp]
    total: 120 B per rank and step, 2 collectives
    peak: 300 B of memory per rank, beyond stored parameters and activations
    """
    states = {id(s): s for m in module.modules() if (s := state_of(m)) is not None}
    found = [(s, group) for s in states.values() for group in s.groups]
    if not found:
        raise ValueError(
            f"explain got a {type(module).__name__} without data-parallel modules.\n"
            "  why: It prints the groups that fully_shard, replicate or zero make.\n"
            "  fix: fully_shard(module, mesh=mesh) first"
        )
    root = state_of(module)
    return Explanation(tuple(_traffic(s, group, root) for s, group in found))


def _traffic(state: State, group: Group, root: State | None) -> GroupTraffic:
    reshard = state is not root if state.reshard is None else state.reshard
    again = reshard
    if again and group.backward_order is not None and not group.backward_order.is_empty:
        again = group in group.backward_order
    texts = Counter(
        f"stored {s.stored}, computed {s.computed}, gradient {_gradient(group, i)}"
        for i, s in enumerate(group.slots)
    )
    return GroupTraffic(
        group.name,
        len(group.slots),
        tuple(texts.items()),
        group.gather_plan(),
        group.gather_again_plan() if again else None,
        tuple(group.reduction.plans(group.buckets)),
        group.mesh.size(),
        _memory(group, kept=not reshard),
    )


def _memory(group: Group, kept: bool) -> GroupMemory:
    moved = [s for s in group.slots if s.is_moved] if not group.is_in_place else []
    wire = group.policy.reduce_dtype
    trained = [
        [group.slots[i] for i in bucket if group.slots[i].param.requires_grad] for bucket in group.buckets
    ]

    def summed(layout: str, cast: torch.dtype | None) -> tuple[int, ...]:
        return tuple(sum(_size(getattr(s, layout), cast or s.dtype) for s in slots) for slots in trained)

    return GroupMemory(
        sum(_size(s.stored, s.dtype) for s in moved),
        sum(_size(s.computed, s.dtype) for s in moved),
        summed("computed", None),
        summed("computed", wire),
        summed("stored", wire),
        not moved,
        kept,
        group.reshard_after_backward,
    )


def _size(layout: Layout, dtype: torch.dtype) -> int:
    """The bytes of the first rank's block, which is never smaller than others."""
    return math.prod(block_shape(layout, (0,) * len(layout.axes.sizes))) * dtype.itemsize


def _gradient(group: Group, i: int) -> str:
    slot = group.slots[i]
    if not slot.param.requires_grad:
        return "none"
    return f"{slot.pending_gradient(slot.computed, 'avg')} -> {slot.stored}"
