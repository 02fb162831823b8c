"""Choosing between an op's row and what others offer for it."""

from __future__ import annotations

from typing import Any

from shardwise.alternatives import argmax as extremes
from shardwise.alternatives import convolution, losses, pooling, statistics, unfold
from shardwise.alternatives import embedding as tables
from shardwise.alternatives import normalization as normalize
from shardwise.alternatives import rearrange as ranges
from shardwise.alternatives import resample as resampled
from shardwise.alternatives import slicing as slices
from shardwise.alternatives.alternative import Maker, Offer, seconds_of
from shardwise.call.fallback import plans_to_whole
from shardwise.call.resolve import Prepared, tensors_in

__all__ = ["OFFERS", "better", "offered"]

# By op. A family of programs is a file with such a dictionary.
_FAMILIES = (
    statistics, slices, ranges, unfold, convolution, pooling, resampled, normalize, losses, extremes, tables,
)  # fmt: skip
OFFERS: dict[Any, Maker] = {op: make for family in _FAMILIES for op, make in family.OFFERS.items()}


def better(func: Any, recipe: Prepared | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Offer | None:
    """What is offered for a call, if it is cheaper than the row's recipe, or than the whole where there is none."""
    if func not in OFFERS:
        return None
    plans = plans_to_whole(tensors_in([*args, *kwargs.values()])) if recipe is None else recipe.moves
    known = seconds_of(plans)
    offer = offered(func, recipe, args, kwargs) if known else None
    return None if offer is None or offer.seconds >= known else offer


def offered(
    func: Any, recipe: Prepared | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Offer | None:
    """What is offered for a call, if anything."""
    make = OFFERS.get(func)
    return None if make is None else make(args, kwargs, recipe)
