"""Placements as a spec shows them: those on axes of size 1, which change nothing, and torch's ways to write an order or a
factor. Layouts leave them out, and a spec remembers those that it was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardwise.layout.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.placement import MaskPartial, Placement, Shard, StridedShard
from shardwise.layout.sizes import are_symbolic, cached

__all__ = ["UnitPlacements", "shown_placements", "spelled", "unit_placements", "without_pending"]

UnitPlacements = tuple[tuple[int, Placement], ...]
"""Pairs of an axis and the placement that was given for it: for axes of size 1 those other than `Replicate()`; for all axes
`_StridedShard`, other splits of the same dim, and `_MaskPartial`."""


def unit_placements(layout: Layout, placements: Sequence[Placement]) -> UnitPlacements:
    """What the placements from which a layout was made say beside it.

    >>> from shardwise.layout import Axes, Partial
    >>> placements = (Shard(1), Shard(-1), Partial())
    >>> unit_placements(Layout.of((4, 6), Axes((2, 1, 1)), placements), placements)
    ((1, Shard(dim=1)), (2, Partial(sum)))
    >>> placements = (StridedShard(0, split_factor=2), Shard(0))
    >>> unit_placements(Layout.of((8,), Axes((2, 2)), placements), placements)
    ((0, _StridedShard(dim=0, sf=2)), (1, Shard(dim=0)))
    """
    sizes = layout.axes.sizes
    if 1 not in sizes and not any(isinstance(p, StridedShard | MaskPartial) for p in placements):
        return ()
    strided = {p.dim % layout.ndim for p in placements if isinstance(p, StridedShard)}
    given: list[tuple[int, Placement]] = []
    for a, (p, n) in enumerate(zip(placements, sizes, strict=True)):
        if isinstance(p, Shard | StridedShard):
            p = replace(p, dim=p.dim % layout.ndim)
            if n == 1 or p.dim in strided:
                given.append((a, p))
        elif (n == 1 and not p.is_replicate()) or isinstance(p, MaskPartial):
            given.append((a, p))
    if _is_same(layout, tuple(given)):
        return tuple(given)
    # the canonical form of the other axes may have other factors than those that were given
    return tuple((a, Shard(p.dim) if isinstance(p, Shard) else p) for a, p in given if sizes[a] == 1)


def _is_same(layout: Layout, units: UnitPlacements) -> bool:
    """Whether a layout is what its placements are with these in their places."""
    merged = list(layout.placements)
    for a, p in units:
        merged[a] = p
    try:
        return Layout.of(layout.shape, layout.axes, merged) is layout
    except LayoutError:
        return False


@cached(4096)
def spelled(layout: Layout, units: UnitPlacements) -> UnitPlacements:
    """Those of the placements that go with a layout; what a larger axis was given is forgotten where it no longer holds."""
    sizes = layout.axes.sizes
    if all(sizes[a] == 1 and not isinstance(p, StridedShard) for a, p in units) or _is_same(layout, units):
        return units
    return tuple((a, p) for a, p in units if sizes[a] == 1)


def without_pending(units: UnitPlacements) -> UnitPlacements:
    """The placements of a gradient, which has no pending reductions."""
    return tuple((a, p) for a, p in units if not p.is_partial())


@cached(4096)
def shown_placements(layout: Layout) -> tuple[Placement, ...]:
    """The placements of a layout, where an axis splits an inner factor of a dim as torch writes it, if torch can.

    Programs take a `Shard` for one range of the dim, which it is not then.

    >>> from shardwise.layout import Axes, Factor
    >>> shown_placements(Layout(Axes((3,)), [(Factor(4), Factor(5, (0,)))]))
    (_StridedShard(dim=0, sf=4),)
    >>> shown_placements(Layout(Axes((3,)), [(Factor(4, (0,)), Factor(5))]))
    (Shard(dim=0, factors=(4, 5), factor=0),)
    """
    out = list(layout.placements)
    for d, dim in enumerate(layout.dims):
        if len(dim) == 1:
            continue
        before = _parts_before(layout, d)
        if are_symbolic(before.values()):
            return layout.placements
        for a, parts in before.items():
            out[a] = StridedShard(d, split_factor=parts) if parts > 1 else Shard(d)
        if not _is_same(layout, tuple(enumerate(out))):
            return layout.placements
    return tuple(out)


def _parts_before(layout: Layout, d: int) -> dict[int, int]:
    """For each axis that splits a dim the elements of the factors before its own, of which earlier axes leave a part."""
    sizes = layout.axes.sizes
    factors = layout.dims[d]
    position = {a: i for i, f in enumerate(factors) for a in f.axes}
    left = [f.size for f in factors]
    out = {}
    for a in sorted(position):
        i = position[a]
        out[a] = math.prod(left[:i])
        left[i] = -(-left[i] // sizes[a])
    return out
