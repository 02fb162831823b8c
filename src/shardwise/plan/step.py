"""Steps and plans: frozen values that describe communication, to be run, costed, printed or simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from shardwise.layout import Layout, block_shape
from shardwise.layout.sizes import as_size
from shardwise.plan.traffic import elements_kept, elements_shared

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Identity",
    "Permute",
    "Plan",
    "ReduceScatter",
    "Slice",
    "Step",
]


@dataclass(frozen=True)
class Step:
    """One collective or one local operation that leads from one layout to another.

    Attributes:
        source: the layout before.
        target: the layout after.
        axes: the mesh axes that it communicates over; none for a local operation.
        name: what it is called in printed plans.
    """

    source: Layout
    target: Layout
    axes: tuple[int, ...] = ()

    name: ClassVar[str]

    @cached_property
    def elements(self) -> int:
        """The number of elements that ranks send, summed over all ranks of the mesh."""
        return 0

    @property
    def is_collective(self) -> bool:
        return bool(self.axes)

    def shape_at(self, coord: Sequence[int]) -> tuple[int, ...]:
        """The shape of the block of a coord afterwards."""
        return block_shape(self.target, coord)

    @property
    def group_size(self) -> int:
        """The number of ranks in each group that communicates."""
        return math.prod(self.source.axes.sizes_of(self.axes))

    @property
    def reduced(self) -> dict[int, str]:
        """The axes that this step reduces over, with the reduction of each."""
        kept = dict(self.target.partial)
        return {a: op for a, op in self.source.partial if a in self.axes and a not in kept}

    def __str__(self) -> str:
        over = f" over {','.join(self.source.axes.names_of(self.axes))}" if self.axes else ""
        return f"{self.name}{over}: {self.source} -> {self.target}"


class Slice(Step):
    """Each rank keeps a part of its block."""

    name = "slice"


class Identity(Step):
    """A value becomes partial values that reduce to it, on each rank without communication; or a sum becomes a mean."""

    name = "partial identity"


class AllGather(Step):
    """Each rank gets the blocks of all ranks of its group."""

    name = "all-gather"

    @cached_property
    def elements(self) -> int:
        return elements_kept(self.target) - elements_kept(self.source)


class AllToAll(Step):
    """Each rank sends every other rank of its group the part of its block that the other needs."""

    name = "all-to-all"

    @cached_property
    def elements(self) -> int:
        return elements_kept(self.target) - elements_shared(self.source, self.target)


class Permute(AllToAll):
    """An all-to-all in which each rank gets its entire block from one other rank."""

    name = "permute"


class AllReduce(Step):
    """Each rank gets the reduction of all blocks."""

    name = "all-reduce"

    @cached_property
    def elements(self) -> int:
        # a ring sends (n-1)/n of a block twice; the ranks of a group have blocks of equal size, so this is exact
        return 2 * (self.group_size - 1) * elements_kept(self.source) // self.group_size


class ReduceScatter(Step):
    """Each rank gets its part of the reduction of all blocks, which other axes may slice further."""

    name = "reduce-scatter"

    @cached_property
    def elements(self) -> int:
        return (self.group_size - 1) * elements_kept(self.target)


# eq=False: plans come from a cache and are keys of others, so they compare by identity
@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from one layout to another.

    >>> from shardwise.layout import Axes, parse_layout
    >>> from shardwise.plan import plan_redistribute
    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> a, b = parse_layout("[8:dp, 6] P(tp,sum)", axes)[0], parse_layout("[8, 6:tp]", axes)[0]
    >>> print(plan_redistribute(a, b, itemsize=4))
    [8:dp, 6] P(tp,sum) -> [8, 6:tp]
      reduce-scatter over tp: [8:dp, 6] P(tp,sum) -> [8:dp, 6:tp]   192 B
      all-gather over dp: [8:dp, 6:tp] -> [8, 6:tp]   192 B
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    itemsize: int

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(step.is_collective for step in self.steps)

    @property
    def bytes(self) -> int:
        """The number of bytes that ranks send, summed over all ranks of the mesh."""
        return self.itemsize * sum(step.elements for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}"]
        for step in self.steps:
            lines.append(f"  {step}   {as_size(step.elements * self.itemsize):,} B")
        return "\n".join(lines)
