"""The cheapest plan from one layout to another: Dijkstra's algorithm over layouts, under the cost model."""

from __future__ import annotations

import heapq
import itertools

from shardwise.layout import Layout, LayoutError, largest_block
from shardwise.layout.sizes import most, same_sizes
from shardwise.plan.cost import CostModel
from shardwise.plan.edges import steps_towards
from shardwise.plan.settings import current_settings
from shardwise.plan.step import Plan, Slice, Step

__all__ = ["plan_redistribute"]

_Cost = tuple[int, float, int]
_MAX_PLANS = 1 << 14  # kept per cost model


def plan_redistribute(
    source: Layout, target: Layout, itemsize: int = 4, model: CostModel | None = None
) -> Plan:
    """The cheapest plan from `source` to `target`.

    Of the steps that `steps_towards` proposes, the plan takes a path on which no intermediate layout has larger blocks than
    both ends, if there is one; of those the cheapest, and of equally cheap ones the one with the fewest steps.

    Args:
        source: the present layout.
        target: the wanted layout, of the same shape and on the same axes.
        itemsize: bytes per element.
        model: the cost model; by default the one of the `costs` block around the call.

    Returns:
        A `Plan`, a value that can be printed and costed. Equal arguments give the same object.

    Raises:
        LayoutError: the layouts differ in shape or in their mesh axes.

    Nothing is communicated.

    >>> from shardwise.layout import Axes, parse_layout
    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> a, b = parse_layout("[8:dp,tp, 6]", axes)[0], parse_layout("[8:tp,dp, 6]", axes)[0]
    >>> [step.name for step in plan_redistribute(a, b).steps]
    ['permute']
    """
    decisions = current_settings().decisions
    if model is not None and model is not decisions.model:
        return _search(source, target, itemsize, model)
    key = (source, target, itemsize)
    plan = decisions.plans.get(key)
    if plan is None:
        plans = decisions.plans
        if source.is_symbolic or target.is_symbolic:
            plans, source, target = decisions.symbolic_plans, source.refreshed(), target.refreshed()
            key = (source, target, itemsize)
        if len(plans) >= _MAX_PLANS:
            plans.pop(next(iter(plans)), None)
        plan = plans.get(key) or plans.setdefault(key, _search(source, target, itemsize, decisions.model))
    return plan  # type: ignore[no-any-return]


def _search(source: Layout, target: Layout, itemsize: int, model: CostModel) -> Plan:
    if source.axes != target.axes or not same_sizes(source.shape, target.shape):
        raise LayoutError(
            f"{source} cannot be redistributed to {target}.",
            why=f"The first is {source.shape} on ({source.axes}), the second {target.shape} on ({target.axes}).",
            fix="Redistribute within one mesh, and keep the shape.",
        )
    if 0 in source.shape and source is not target:
        # without elements there is nothing to send
        return Plan(source, target, (Slice(source, target),), itemsize)
    limit = most(largest_block(source), largest_block(target))
    tick = itertools.count()  # equal costs are taken in the order found, so that every rank chooses alike
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
            over = excess if step.target is target else most(excess, largest_block(step.target) - limit)
            cost = (over, seconds + model.seconds(step, itemsize), count + 1)
            heapq.heappush(queue, (cost, next(tick), step.target, (*steps, step)))
    raise RuntimeError(f"no plan from {source} to {target} was found; please report this bug in shardwise")
