"""torch's `_StridedShard`, read as the order of axes on a dim or as the factor of a dim that an axis splits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.layout.axes import Axes
from shardwise.layout.errors import LayoutError
from shardwise.layout.placement import Placement, Replicate, Shard, StridedShard

__all__ = ["without_strided"]


def without_strided(
    shape: Sequence[int], axes: Axes, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """The same placements with `order` and `factors` in place of strided shards. Dims must not be negative.

    >>> without_strided((8,), Axes((2, 2)), (StridedShard(0, split_factor=2), Shard(0)))
    (Shard(dim=0, order=1), Shard(dim=0, order=0))
    >>> without_strided((12,), Axes((2,)), (StridedShard(0, split_factor=3),))
    (Shard(dim=0, factors=(3, 4), factor=1),)
    """
    out: list[Placement] = list(placements)
    for d in {p.dim for p in placements if isinstance(p, StridedShard)}:
        on_dim = [
            (a, p) for a, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and p.dim == d
        ]
        for a, p in _read(shape[d], axes, on_dim).items():
            out[a] = p
    return tuple(out)


def _read(size: int, axes: Axes, on_dim: Sequence[tuple[int, Shard | StridedShard]]) -> dict[int, Placement]:
    """The placements of the axes on one dim. The split factor is the number of blocks that an axis finds there already,
    if the axes are applied from the last to the first; if no axes account for it, it is that of a factor of the dim.
    """
    sizes = axes.sizes
    outer: list[int] = []
    order: list[int] = []
    factor = 1
    for a, p in reversed(on_dim):
        if sizes[a] == 1:
            continue
        if isinstance(p, Shard):
            if not p.is_plain:
                raise _unreadable(size, axes, on_dim)
            (outer if factor > 1 else order).insert(0, a)
            continue
        blocks = [math.prod(sizes[b] for b in order[:k]) for k in range(len(order) + 1)]
        if factor == 1 and p.split_factor in blocks:
            order.insert(blocks.index(p.split_factor), a)
        elif factor == 1 and not order and size % p.split_factor == 0:
            factor = p.split_factor
            order.append(a)
        elif factor > 1 and p.split_factor == blocks[-1] and not outer and factor % sizes[a] == 0:
            outer.append(
                a
            )  # FSDP over a packed dim: the blocks of the packed parts are cut after the other axis
        else:
            raise _unreadable(size, axes, on_dim)
    out: dict[int, Placement] = {a: Replicate() for a, _ in on_dim}
    factors = (factor, size // factor) if factor > 1 else ()
    for i, group in enumerate((outer, order)):
        in_mesh_order = sorted(group) == group
        for k, a in enumerate(group):
            out[a] = Shard(on_dim[0][1].dim, None if in_mesh_order else k, factors, i if factors else 0)
    return out


def _unreadable(size: int, axes: Axes, on_dim: Sequence[tuple[int, Shard | StridedShard]]) -> LayoutError:
    on = ", ".join(f"{axes.names[a]} ({axes.sizes[a]}): {p}" for a, p in on_dim)
    return LayoutError(
        f"Dim {on_dim[0][1].dim} of size {size} cannot be split as {on}.",
        why="split_factor is the number of blocks that later axes split the dim into, or a divisor of its size.",
        fix="Shard(dim, order=...) for the order of the axes, or Shard(dim, factors=(a, b), factor=1)",
    )
