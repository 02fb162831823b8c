"""Exchanges of index ranges along one dim: each rank receives exactly the positions it wants and does not have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.layout import Axes, Layout, cut
from shardwise.layout.sizes import as_size, cached, least, most
from shardwise.plan.step import Plan, Step

__all__ = ["Exchange", "Extent", "Move", "Range", "Ranges", "chunked", "place_of", "plan_exchanges"]

Range = tuple[int, int]
"""Positions along a dim: `[low, high)`."""
Ranges = tuple[Range, ...]
"""The positions that one rank owns or wants along a dim, in the order of its block."""


class Extent(NamedTuple):
    """The lengths of blocks along a dim, by the coords on the axes that split it, in row-major order."""

    axes: tuple[int, ...]
    lengths: tuple[int, ...]


class Move(NamedTuple):
    """An exchange along one dim that `axes` split: the ranges that each of their coords owns, and those it wants."""

    dim: int
    axes: tuple[int, ...]
    owned: tuple[Ranges, ...]
    wanted: tuple[Ranges, ...]


@cached(4096)
def chunked(size: int, axes: tuple[int, ...], on: Axes) -> tuple[Range, ...]:
    """The ranges of a dim that some axes split one after the other, by their coords in row-major order.

    >>> chunked(5, (1, 0), Axes((2, 2)))
    ((0, 2), (2, 3), (3, 4), (4, 5))
    """
    parts = on.sizes_of(axes)
    return tuple(cut(size, parts, c) for c in itertools.product(*map(range, parts)))


def place_of(coord: Sequence[int], axes: Sequence[int], on: Axes) -> int:
    """The index of a coord among those on some axes, in row-major order.

    >>> place_of((1, 0, 2), (2, 0), Axes((2, 2, 3)))
    5
    """
    out = 0
    for a in axes:
        out = out * on.sizes[a] + coord[a]
    return out


def total(ranges: Ranges) -> int:
    """The number of positions in some ranges."""
    return sum(high - low for low, high in ranges)


class Overlap(NamedTuple):
    """A range that one rank owns and another wants: its start in the owner's block and in the other's, and its length."""

    start: int
    into: int
    length: int


def overlaps(owned: Ranges, wanted: Ranges) -> list[Overlap]:
    """The overlaps of the ranges that one block owns and another wants, in the order of the latter."""
    out = []
    into = 0
    for low, high in wanted:
        start = 0
        for a, b in owned:
            first, last = max(low, a), min(high, b)
            if first < last:
                out.append(Overlap(start + first - a, into + first - low, last - first))
            start += b - a
        into += high - low
    return sorted(out, key=lambda o: o.into)


def _common(owned: Ranges, wanted: Ranges) -> int:
    """The number of positions that are in both."""
    return sum(most(least(high, b) - most(low, a), 0) for low, high in wanted for a, b in owned)


@dataclass(frozen=True)
class Exchange(Step):
    """Each rank gets the ranges of a dim that it wants from the ranks that own them; ranges that it owns are not sent.

    Attributes:
        dim: the dim.
        owned: the ranges that each rank owns, by index in the group, over `axes` in row-major order; they do not overlap.
        wanted: the ranges that each rank wants, which may overlap.
        extents: the lengths of blocks along all dims, since after another exchange they do not follow from the layout.
    """

    dim: int = 0
    owned: tuple[Ranges, ...] = ()
    wanted: tuple[Ranges, ...] = ()
    extents: tuple[Extent, ...] = ()

    name = "exchange"

    @cached_property
    def elements(self) -> int:
        pairs = zip(self.owned, self.wanted, strict=True)
        arriving = sum(total(w) - _common(h, w) for h, w in pairs)
        used = {*self.axes, *(a for d, e in enumerate(self.extents) if d != self.dim for a in e.axes)}
        copies = math.prod(n for a, n in enumerate(self.source.axes.sizes) if a not in used)
        beside = math.prod(sum(e.lengths) for d, e in enumerate(self.extents) if d != self.dim)
        return as_size(arriving * copies * beside)  # type: ignore[no-any-return]

    @property
    def is_collective(self) -> bool:
        # where it depends on the size whether something moves, the rank decides when it knows the size
        return type(self.elements) is not int or self.elements > 0

    def shape_at(self, coord: Sequence[int]) -> tuple[int, ...]:
        out = list(self.shape_before(coord))
        out[self.dim] = total(self.wanted[place_of(coord, self.axes, self.source.axes)])
        return tuple(out)

    def shape_before(self, coord: Sequence[int]) -> tuple[int, ...]:
        """The shape of the block of a coord before the exchange."""
        on = self.source.axes
        out = [e.lengths[place_of(coord, e.axes, on)] for e in self.extents]
        out[self.dim] = total(self.owned[place_of(coord, self.axes, on)])
        return tuple(out)

    def __str__(self) -> str:
        over = f" over {','.join(self.source.axes.names_of(self.axes))}" if self.axes else ""
        return f"{self.name}{over} along dim {self.dim}: {self.source}"


def plan_exchanges(source: Layout, moves: Sequence[Move], itemsize: int) -> Plan:
    """The plan of exchanges along some dims of a tensor, one after the other, without those that change nothing.

    In general the resulting blocks do not form a layout. `Move.owned` may differ from the ranges of the layout if the
    caller first slices or concatenates blocks locally.

    >>> from shardwise.layout import parse_layout
    >>> on = Axes((2,), ("tp",))
    >>> halo = Move(0, (0,), (((0, 3),), ((3, 5),)), (((0, 4),), ((2, 5),)))
    >>> print(plan_exchanges(parse_layout("[5:tp, 4]", on)[0], [halo], itemsize=4))
    [5:tp, 4] -> [5:tp, 4]
      exchange over tp along dim 0: [5:tp, 4]   32 B
    """
    if source.is_symbolic:
        moves = [Move(m.dim, m.axes, _in_form(m.owned), _in_form(m.wanted)) for m in moves]
    extents = [_extent(source, d) for d in range(source.ndim)]
    for move in moves:
        extents[move.dim] = Extent(move.axes, tuple(map(total, move.owned)))
    steps = []
    for dim, axes, owned, wanted in moves:
        if owned is not wanted and not _are_same(owned, wanted):
            steps.append(Exchange(source, source, axes, dim, owned, wanted, tuple(extents)))
            extents[dim] = Extent(axes, tuple(map(total, wanted)))
    return Plan(source, source, tuple(steps), itemsize)


def _in_form(ranges: tuple[Ranges, ...]) -> tuple[Ranges, ...]:
    return tuple(tuple((as_size(a), as_size(b)) for a, b in each) for each in ranges)


def _are_same(owned: tuple[Ranges, ...], wanted: tuple[Ranges, ...]) -> bool:
    """Whether ranges are the same, as expressions where they are symbols."""
    if [len(r) for r in owned] != [len(r) for r in wanted]:
        return False
    pairs = [
        (m, n)
        for a, b in zip(owned, wanted, strict=True)
        for r, s in zip(a, b, strict=True)
        for m, n in zip(r, s, strict=True)
    ]
    return all(m is n or (type(m) is type(n) is int and m == n) for m, n in pairs)


def _extent(layout: Layout, d: int) -> Extent:
    factors, on = layout.dims[d], layout.axes
    axes = tuple(a for f in factors for a in f.axes)
    lengths = []
    for here in itertools.product(*map(range, on.sizes_of(axes))):
        at = dict(zip(axes, here, strict=True))
        cuts = (cut(f.size, on.sizes_of(f.axes), [at[a] for a in f.axes]) for f in factors)
        lengths.append(math.prod(high - low for low, high in cuts))
    return Extent(axes, tuple(lengths))
