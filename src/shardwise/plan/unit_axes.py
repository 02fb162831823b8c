"""Placements of an op's results on axes of size 1: what its rule would make of them on a larger axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.layout import Partial, Placement, Shard, StridedShard, UnitPlacements
from shardwise.rules import Rule

__all__ = ["units_of_results", "units_of_view"]


def units_of_results(rule: Rule, inputs: Sequence[UnitPlacements], count: int) -> list[UnitPlacements]:
    """For each of `count` results its placements on axes of size 1, given those of the inputs.

    The first input that the rule allows to be split or pending decides: on an axis of size 1 nothing moves, and on others
    specs forget what does not go with their layouts.
    """
    out: list[list[tuple[int, Placement]]] = [[] for _ in range(count)]
    for axis in sorted({a for one in inputs for a, _ in one}):
        on_axis = [dict(one).get(axis) for one in inputs]
        for result, placement in zip(out, _on_axis(rule, on_axis, count), strict=True):
            if placement is not None:
                result.append((axis, placement))
    return [tuple(one) for one in out]


def _on_axis(rule: Rule, inputs: Sequence[Placement | None], count: int) -> list[Placement | None]:
    for i, p in enumerate(inputs):
        if isinstance(p, Shard | StridedShard) and (letter := rule.inputs[i][p.dim]) is not None:
            return [_of_letter(rule, letter, j, p) for j in range(count)]
        if isinstance(p, Partial):
            is_passed = any(i in g and all(inputs[k] == p for k in g) for g in rule.linear)
            op = (
                p.reduce_op if is_passed and p.reduce_op in ("sum", "avg") else rule.monotone.get(p.reduce_op)
            )
            if op is None and p.reduce_op in rule.jointly and all(k == p for k in inputs):
                op = p.reduce_op
            if op is not None:
                return [None if j in rule.alike else Partial(op) for j in range(count)]
    return [None] * count


def _of_letter(rule: Rule, letter: str, j: int, p: Shard | StridedShard) -> Placement | None:
    """The placement of a result on an axis that splits a letter."""
    if j in rule.alike:
        return None
    if letter in rule.outputs[j]:
        return _on_dim(p, rule.outputs[j].index(letter))
    return Partial(rule.reduced[letter]) if letter in rule.reduced else None


def units_of_view(units: UnitPlacements, before: Sequence[int], after: Sequence[int]) -> UnitPlacements:
    """The placements of a view on axes of size 1: a dim stays split if a dim of the result begins where it does.

    >>> units_of_view(((0, Shard(1)), (1, Partial())), (2, 3, 4), (2, 12)), units_of_view(((0, Shard(1)),), (2, 3), (6,))
    (((0, Shard(dim=1)), (1, Partial(sum))), ())
    """
    starts = {math.prod(after[:d]): d for d in range(len(after))}
    out: list[tuple[int, Placement]] = []
    for axis, p in units:
        if not isinstance(p, Shard | StridedShard):
            out.append((axis, p))
        elif (d := starts.get(math.prod(before[: p.dim]))) is not None:
            out.append((axis, _on_dim(p, d)))
    return tuple(out)


def _on_dim(p: Shard | StridedShard, dim: int) -> Placement:
    """The placement on another dim."""
    return StridedShard(dim, split_factor=p.split_factor) if isinstance(p, StridedShard) else Shard(dim)
