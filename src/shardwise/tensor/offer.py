"""An offer: another way to run an op than its row's, with what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwise.layout import Spec
from shardwise.plan import CostModel, Plan
from shardwise.plan.cost import DEFAULT_COSTS
from shardwise.tensor.prepare import Prepared

__all__ = ["Maker", "Offer", "seconds_of"]


class Offer(NamedTuple):
    """What moving data takes, the same on all ranks, and the function of the call's arguments that does it all.

    `outputs` are the results' specs, where they are known: a rank off the mesh has nothing else to go by.
    """

    seconds: float
    run: Callable[..., Any]
    outputs: tuple[Spec, ...] | None = None


# Looks at a call and at its row's recipe, if it has one, and makes an offer, or None. It may read specs, shapes and numbers, never values or this rank's
# coordinate: all ranks must come to the same one.
Maker = Callable[[tuple[Any, ...], dict[str, Any], Prepared | None], Offer | None]


def seconds_of(plans: Sequence[Plan | None], model: CostModel = DEFAULT_COSTS) -> float:
    """What some plans take together."""
    return sum(model.seconds(step, p.itemsize) for p in plans if p is not None for step in p.steps)
