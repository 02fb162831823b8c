"""An offer: another way to run an op than its row's, with what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.call.resolve import Prepared
from shardwise.layout import Layout, Spec
from shardwise.plan import CostModel, Plan, plan_redistribute
from shardwise.plan.cost import DEFAULT_COSTS
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["Maker", "Offer", "exchange_seconds", "in_float32", "seconds_of", "settled"]


class Offer(NamedTuple):
    """What moving data takes, the same on all ranks, and the function of the call's arguments that does it all.

    `outputs` are the results' specs, where they are known: a rank off the mesh has nothing else to go by.
    """

    seconds: float
    run: Callable[..., Any]
    outputs: tuple[Spec, ...] | None = None


# Looks at a call and at its row's recipe, if it has one, and makes an offer, or None. It may read specs, shapes and
# numbers, never values or this rank's coordinate: all ranks must come to the same one.
Maker = Callable[[tuple[Any, ...], dict[str, Any], Prepared | None], Offer | None]


def seconds_of(plans: Sequence[Plan | None], model: CostModel = DEFAULT_COSTS) -> float:
    """What some plans take together."""
    return sum(model.seconds(step, p.itemsize) for p in plans if p is not None for step in p.steps)


def exchange_seconds(layout: Layout, count: int, elements: int, itemsize: int) -> float:
    """What `count` all-reduces of so many elements take, over all axes of a layout's mesh."""
    latency, width = DEFAULT_COSTS.pace(tuple(range(len(layout.axes))))
    return count * (latency + 2 * elements * itemsize / width)


def settled(func: Any, x: Tensor) -> Tensor:
    """A result with nothing pending: what is used twice is reduced once."""
    if not isinstance(x, DTensor) or not x.layout.partial:
        return x
    target = x.layout.with_partial({})
    mind(func, [plan_redistribute(x.layout, target, x.dtype.itemsize)])
    return redistributed(x, target)


_NARROW = (torch.float16, torch.bfloat16)


def in_float32(run: Callable[..., Any], recipe: Prepared) -> Callable[..., Any]:
    """A program that adds in float32 where the call's tensors are narrower, and gives what the op gives."""

    def widened(value: Any) -> Any:
        return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in _NARROW else value

    def go(*args: Any, **kwargs: Any) -> Any:
        result = run(*map(widened, args), **{k: widened(v) for k, v in kwargs.items()})
        dtypes = iter([spec.dtype for spec in recipe.outputs])
        if isinstance(result, Tensor):
            return result.to(next(dtypes))
        return tuple(None if r is None else r.to(next(dtypes)) for r in result)

    return go
