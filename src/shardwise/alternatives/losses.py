"""Losses that divide by what only all ranks know together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, exchange_seconds, seconds_of, settled
from shardwise.call.resolve import Prepared, prepare
from shardwise.rules.tables.loss import MEAN, SUM
from shardwise.tensor.dtensor import DTensor

__all__ = ["OFFERS"]

aten = torch.ops.aten


def _nll_mean(func: Any) -> Maker:
    """A mean over weighted targets: the sum, and the sum of the weights, each in parts."""

    def run(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> Any:
        loss, total = func(x, target, weight, SUM, ignore)
        total = settled(func, total)
        return loss / total, total

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
        if kwargs or args[3] != MEAN or not isinstance(args[0], DTensor):
            return None
        summed = prepare(func, (*args[:3], SUM, args[4]), {})
        if summed is None:
            return None
        one = exchange_seconds(args[0]._spec.layout, 1, 1, args[0].dtype.itemsize)
        return Offer(seconds_of(summed.moves) + one, run)

    return make


OFFERS: dict[Any, Maker] = {
    op: _nll_mean(op) for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
}
