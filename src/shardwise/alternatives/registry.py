"""The alternatives of each op, by family."""

from __future__ import annotations

from typing import Any

from shardwise.alternatives import (
    argmax,
    attention,
    constants,
    convolution,
    embedding,
    losses,
    normalization,
    pooling,
    rearrange,
    resample,
    slicing,
    statistics,
    unfold,
)
from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution

__all__ = ["ALTERNATIVES", "FAMILIES", "WITHOUT_RULE", "propose_alternative"]

FAMILIES = (
    statistics, slicing, rearrange, unfold, convolution, pooling, resample, normalization, losses, argmax, embedding,
    attention, constants,
)  # fmt: skip
ALTERNATIVES: dict[Any, Propose] = {
    op: propose for family in FAMILIES for op, propose in family.ALTERNATIVES.items()
}
WITHOUT_RULE = frozenset({*normalization.WITHOUT_RULE, *embedding.ALTERNATIVES, *constants.ALTERNATIVES})
"""Ops that may have an alternative even where no rule covers the call."""


def propose_alternative(call: OpCall, resolution: Resolution | None) -> Alternative | None:
    """The alternative for a call, if there is one; whether it is cheaper is the router's decision."""
    propose = ALTERNATIVES.get(call.func)
    if propose is None or (resolution is None and call.func not in WITHOUT_RULE):
        return None
    return propose(call, resolution)
