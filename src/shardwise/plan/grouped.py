"""Grouped plans: many tensors move together, with one collective for the steps of one kind over one group of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardwise.layout import Layout, LayoutError, dtype_text
from shardwise.layout.sizes import as_size
from shardwise.plan.cost import CostModel
from shardwise.plan.redistribute import plan_redistribute
from shardwise.plan.settings import current_settings
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Plan, ReduceScatter, Step

__all__ = ["GroupedPlan", "GroupedStep", "Item", "plan_redistribute_many"]

_MAX_PLANS = 1 << 12  # kept per cost model


class Item(NamedTuple):
    """One tensor of a grouped move: its layouts, and its dtype, which is opaque here except for `itemsize`."""

    source: Layout
    target: Layout
    dtype: Any


class Member(NamedTuple):
    """A step of the tensor at an index of the group."""

    tensor: int
    step: Step


@dataclass(frozen=True)
class GroupedStep:
    """Steps that run together: one collective on a flat buffer, or local steps.

    Attributes:
        kind: "all-gather", "all-to-all", "all-reduce", "reduce-scatter", or "local".
        axes: the mesh axes that it communicates over; none for local steps.
        op: the reduction of the values on the wire; empty for moves.
        members: the steps, with the indices of their tensors.
        itemsizes: bytes per element of each member.
    """

    kind: str
    axes: tuple[int, ...]
    op: str
    members: tuple[Member, ...]
    itemsizes: tuple[int, ...]

    @property
    def is_collective(self) -> bool:
        return bool(self.axes)

    @property
    def group_size(self) -> int:
        """The number of ranks in each group that communicates."""
        return self.members[0].step.group_size

    @cached_property
    def bytes(self) -> int:
        """The number of bytes that ranks send, summed over all ranks of the mesh."""
        sizes = zip(self.members, self.itemsizes, strict=True)
        return sum(member.step.elements * itemsize for member, itemsize in sizes)

    def __str__(self) -> str:
        on = self.members[0].step.source.axes
        what = f"{len(self.members)} tensor{'s' if len(self.members) > 1 else ''}"
        if not self.axes:
            return f"local: {what}"
        return f"{self.kind} over {','.join(on.names_of(self.axes))}: {what}"


# eq=False: plans come from a cache and are keys of others, so they compare by identity
@dataclass(frozen=True, eq=False)
class GroupedPlan:
    """The steps of many tensors from one layout to another each, grouped into few collectives.

    >>> from shardwise.layout import Axes, parse_layout
    >>> import torch
    >>> axes = Axes((2,), ("dp",))
    >>> a, b = parse_layout("[8:dp, 6]", axes)[0], parse_layout("[8, 6]", axes)[0]
    >>> c, d = parse_layout("[5:dp]", axes)[0], parse_layout("[5]", axes)[0]
    >>> print(plan_redistribute_many([Item(a, b, torch.float32), Item(c, d, torch.float32)]))
    2 tensors
      all-gather over dp: 2 tensors   212 B
        f32 [8:dp, 6] -> [8, 6]   192 B
        f32 [5:dp] -> [5]   20 B
    """

    items: tuple[Item, ...]
    plans: tuple[Plan, ...]
    steps: tuple[GroupedStep, ...]

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(step.is_collective for step in self.steps)

    @property
    def is_symbolic(self) -> bool:
        """Whether some size is a symbol."""
        return any(item.source.is_symbolic for item in self.items)

    @cached_property
    def last_collective(self) -> int | None:
        """The index of the last step that is a collective."""
        return max((i for i, step in enumerate(self.steps) if step.is_collective), default=None)

    @cached_property
    def is_one_step(self) -> bool:
        """Whether one step takes all tensors, in their order."""
        return len(self.steps) == 1 and [m.tensor for m in self.steps[0].members] == [*range(len(self.items))]

    @property
    def bytes(self) -> int:
        """The number of bytes that ranks send, summed over all ranks of the mesh; the sum over the tensors' own plans."""
        return sum(step.bytes for step in self.steps)

    def seconds(self, model: CostModel) -> float:
        """The modelled time: each collective has the latency once, and the bytes of all its members."""
        total = 0.0
        for step in self.steps:
            if step.is_collective:
                on = step.members[0].step.source.axes
                latency, bandwidth = model.pace(on, step.axes)
                total += latency + step.bytes / on.count / bandwidth
        return total

    def __str__(self) -> str:
        lines = [f"{len(self.items)} tensor{'' if len(self.items) == 1 else 's'}"]
        for grouped in self.steps:
            lines.append(f"  {grouped}   {as_size(grouped.bytes):,} B")
            for (tensor, step), itemsize in zip(grouped.members, grouped.itemsizes, strict=True):
                dtype = dtype_text(self.items[tensor].dtype)
                sent = f"   {as_size(step.elements * itemsize):,} B" if grouped.is_collective else ""
                lines.append(f"    {dtype} {step.source} -> {step.target}{sent}")
        return "\n".join(lines)


def plan_redistribute_many(items: Iterable[Item]) -> GroupedPlan:
    """The plan that moves many tensors of one mesh, each from its source to its target layout.

    Each tensor takes the steps of its own cheapest plan, in their order, so the bytes are those of the single plans. Steps of
    one kind over the same axes become one collective: moves whatever their dtypes, reductions if dtype and op agree.

    Args:
        items: source layout, target layout and dtype of each tensor; all layouts on the same axes.

    Returns:
        A `GroupedPlan`, a value that can be printed and costed. Equal arguments give the same object.

    Raises:
        LayoutError: the layouts of an item differ in shape, or layouts are on different axes.

    Nothing is communicated.
    """
    decisions = current_settings().decisions
    listed = tuple(items)
    key = (GroupedPlan, listed)
    plan = decisions.plans.get(key)
    if plan is None:
        plans = decisions.plans
        if any(i.source.is_symbolic or i.target.is_symbolic for i in listed):
            plans = decisions.symbolic_plans
            listed = tuple(
                i._replace(source=i.source.refreshed(), target=i.target.refreshed()) for i in listed
            )
            key = (GroupedPlan, listed)
        if len(plans) >= _MAX_PLANS:
            plans.pop(next(iter(plans)), None)
        plan = plans.get(key) or plans.setdefault(key, _plan(listed))
    return plan  # type: ignore[no-any-return]


def _plan(items: tuple[Item, ...]) -> GroupedPlan:
    for item in items:
        if item.source.axes != items[0].source.axes:
            raise LayoutError(
                f"A grouped plan got layouts on ({items[0].source.axes}) and on ({item.source.axes}).",
                why="Its collectives run over the groups of one mesh.",
                fix="Make one plan for each mesh.",
            )
    plans = tuple(plan_redistribute(i.source, i.target, i.dtype.itemsize) for i in items)
    return GroupedPlan(items, plans, _grouped(items, plans))


def _grouped(items: Sequence[Item], plans: Sequence[Plan]) -> tuple[GroupedStep, ...]:
    """The steps of all plans in an order that keeps that of each plan, merged by kind.

    A collective waits while a tensor that still has other steps to do will join it, unless two wait for each other; then
    the one that fewer tensors would miss goes first.
    """
    todo = [[(_kind(step, item), step) for step in p.steps] for item, p in zip(items, plans, strict=True)]
    out = []
    while any(todo):
        local = [i for i, steps in enumerate(todo) if steps and not steps[0][0][1]]
        if local:
            chosen, members = ("local", (), ""), local
        else:
            ready: dict[Any, list[int]] = {}
            for i, steps in enumerate(todo):
                if steps:
                    ready.setdefault(steps[0][0], []).append(i)
            late = {k: sum(any(kind == k for kind, _ in steps[1:]) for steps in todo) for k in ready}
            key = min(ready, key=lambda k: (late[k], -len(ready[k])))
            chosen, members = key[:3], ready[key]
        steps_now = tuple(Member(i, todo[i].pop(0)[1]) for i in members)
        sizes = tuple(items[i].dtype.itemsize for i in members)
        out.append(GroupedStep(*chosen, steps_now, sizes))
    return tuple(out)


def _kind(step: Step, item: Item) -> tuple[str, tuple[int, ...], str, Hashable]:
    """What steps must have in common to be one collective: its name, axes, reduction, and for reductions the dtype."""
    if not step.is_collective:
        return "local", (), "", None
    match step:
        case AllGather():
            return "all-gather", step.axes, "", None
        case AllToAll():
            return "all-to-all", step.axes, "", None
        case AllReduce() | ReduceScatter():
            op = next(iter(step.reduced.values()))
            return step.name, step.axes, "sum" if op == "avg" else op, item.dtype
        case _:
            raise TypeError(f"a plan between two layouts has no {type(step).__name__}")
