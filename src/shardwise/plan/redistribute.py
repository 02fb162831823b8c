"""The cheapest way from one layout to another: Dijkstra over layouts, under the cost model."""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache

from shardwise.layout import Layout, LayoutError, largest_block
from shardwise.plan.cost import DEFAULT_COSTS, CostModel
from shardwise.plan.edges import steps_towards
from shardwise.plan.step import Plan, Slice, Step

__all__ = ["plan_redistribute"]

_Cost = tuple[int, float, int]


@lru_cache(maxsize=4096)
def plan_redistribute(
    source: Layout, target: Layout, itemsize: int = 4, model: CostModel = DEFAULT_COSTS
) -> Plan:
    """The plan from `source` to `target` for elements of `itemsize` bytes.

    Of the ways that `steps_towards` offers it is one on which no layout has larger blocks than both ends, if there
    is one; of those the cheapest under `model`, and among equals the one with the fewest steps.

    >>> from shardwise.layout import Axes, parse_layout
    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> a, b = parse_layout("[8:dp,tp, 6]", axes)[0], parse_layout("[8:tp,dp, 6]", axes)[0]
    >>> [step.name for step in plan_redistribute(a, b).steps]
    ['permute']
    """
    if source.axes != target.axes or source.shape != target.shape:
        raise LayoutError(
            f"{source} cannot become {target}.",
            why=f"the first is {source.shape} on ({source.axes}), the second {target.shape} on ({target.axes})",
            fix="redistribute within one mesh, and keep the shape",
        )
    if 0 in source.shape and source is not target:
        return Plan(source, target, (Slice(source, target),), itemsize)  # nothing to send, whatever it is
    room = max(largest_block(source), largest_block(target))
    tick = itertools.count()  # ties are taken in the order found, so that every rank takes the same
    start: tuple[_Cost, int, Layout, tuple[Step, ...]] = ((0, 0.0, 0), next(tick), source, ())
    queue = [start]
    done: set[Layout] = set()
    while queue:
        (excess, seconds, count), _, here, steps = heapq.heappop(queue)
        if here is target:
            return Plan(source, target, steps, itemsize)
        if here in done:
            continue
        done.add(here)
        for step in steps_towards(here, target):
            if step.target in done:
                continue
            over = max(excess, largest_block(step.target) - room)
            cost = (over, seconds + model.seconds(step, itemsize), count + 1)
            heapq.heappush(queue, (cost, next(tick), step.target, (*steps, step)))
    raise LayoutError(
        f"there is no way from {source} to {target}.",
        why="the search ended without one, which is a mistake in shardwise",
        fix="please report these two layouts",
    )
