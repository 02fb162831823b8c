"""Placements on axes of size 1: they change nothing, so layouts leave them out, and a spec remembers them for its user."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.layout.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement, Shard

__all__ = ["UnitPlacements", "unit_placements", "without_pending"]

UnitPlacements = tuple[tuple[int, Placement], ...]
"""Pairs of an axis of size 1 and its placement, for placements other than `Replicate()`."""


def unit_placements(layout: Layout, placements: Sequence[Placement]) -> UnitPlacements:
    """The placements on axes of size 1, of those from which a layout was made.

    >>> from shardwise.layout import Axes, Partial
    >>> placements = (Shard(1), Shard(-1), Partial())
    >>> unit_placements(Layout.of((4, 6), Axes((2, 1, 1)), placements), placements)
    ((1, Shard(dim=1)), (2, Partial(sum)))
    """
    sizes = layout.axes.sizes
    if 1 not in sizes:
        return ()
    given = [
        (a, Shard(p.dim % layout.ndim, p.order, p.factors, p.factor) if isinstance(p, Shard) else p)
        for a, (p, n) in enumerate(zip(placements, sizes, strict=True))
        if n == 1 and not p.is_replicate()
    ]
    merged = list(layout.placements)
    for a, p in given:
        merged[a] = p
    try:
        is_same = Layout.of(layout.shape, layout.axes, merged) is layout
    except LayoutError:
        is_same = False
    if is_same:
        return tuple(given)
    # the canonical form of the other axes may have other factors than those that were given
    return tuple((a, Shard(p.dim) if isinstance(p, Shard) else p) for a, p in given)


def without_pending(units: UnitPlacements) -> UnitPlacements:
    """The placements of a gradient, which has no pending reductions."""
    return tuple((a, p) for a, p in units if not p.is_partial())
