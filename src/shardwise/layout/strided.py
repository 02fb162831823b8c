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
    """The placements of the axes on one dim.

    Each axis splits what the axes before it have left, as after a view. Where each split factor is the number of blocks of
    the later axes, as FSDP writes it, both ways agree if the blocks are even, and only the other one reads uneven blocks.
    """
    split = [(a, p) for a, p in on_dim if axes.sizes[a] > 1]
    blocks = [math.prod(axes.sizes[b] for b, _ in split[i + 1 :]) for i in range(len(split))]
    is_order = all(
        isinstance(p, StridedShard) and p.split_factor == n
        for (_, p), n in zip(split[:-1], blocks, strict=False)
    )
    ends_plainly = bool(split) and isinstance(split[-1][1], Shard)
    found = _read_backwards(size, axes, on_dim) if is_order or ends_plainly else None
    found = _read_forwards(size, axes, on_dim) if found is None else found
    if found is None:
        raise _unreadable(size, axes, on_dim)
    return found


def _read_forwards(
    size: int, axes: Axes, on_dim: Sequence[tuple[int, Shard | StridedShard]]
) -> dict[int, Placement] | None:
    """The placements of axes that each split a part of the block that the axes before have left: its parts after the first
    `split_factor` ones.

    >>> _read_forwards(96, Axes((2, 2)), [(0, StridedShard(0, split_factor=4)), (1, StridedShard(0, split_factor=8))])
    {0: Shard(dim=0, factors=(4, 4, 6), factor=1), 1: Shard(dim=0, factors=(4, 4, 6), factor=2)}
    """
    factors: list[tuple[int, tuple[int, ...]]] = [(size, ())]
    for a, p in on_dim:
        if axes.sizes[a] == 1:
            continue
        if isinstance(p, Shard) and not p.is_plain:
            return None
        refined = _with_boundary(factors, axes, p.split_factor if isinstance(p, StridedShard) else 1)
        if refined is None:
            return None
        factors, at = refined
        split_by = (*factors[at][1], a)
        # an uneven split cuts through the later factors
        if at + 1 < len(factors) and factors[at][0] % math.prod(axes.sizes[b] for b in split_by):
            return None
        factors[at] = (factors[at][0], split_by)
    sizes = tuple(n for n, _ in factors)
    out: dict[int, Placement] = {a: Replicate() for a, _ in on_dim}
    for i, (_, split_by) in enumerate(factors):
        out |= {a: Shard(on_dim[0][1].dim, None, sizes, i) for a in split_by}
    return out


def _with_boundary(
    factors: list[tuple[int, tuple[int, ...]]], axes: Axes, parts: int
) -> tuple[list[tuple[int, tuple[int, ...]]], int] | None:
    """Factors of which the first ones leave `parts` elements on each rank, and the index of the one after them."""
    for i, (size, split_by) in enumerate(factors):
        if parts == 1:
            return list(factors), i
        ranks = math.prod(axes.sizes[a] for a in split_by)
        if size % ranks:
            return None
        left = size // ranks
        if left > parts and left % parts == 0:
            inner = left // parts
            return [*factors[:i], (size // inner, split_by), (inner, ()), *factors[i + 1 :]], i + 1
        if parts % left:
            return None
        parts //= left
    return None


def _read_backwards(
    size: int, axes: Axes, on_dim: Sequence[tuple[int, Shard | StridedShard]]
) -> dict[int, Placement] | None:
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
                return None
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
            return None
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
        why="split_factor is the number of blocks that later axes split the dim into, or a divisor of what earlier ones leave.",
        fix="Shard(dim, order=...) for the order of the axes, or Shard(dim, factors=(a, b), factor=1)",
    )
