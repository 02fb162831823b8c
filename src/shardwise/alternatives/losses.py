"""Losses that divide by a sum over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose, reduce_pending
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution, resolve
from shardwise.rules.tables.loss import MEAN, SUM
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _nll_mean(call: OpCall, resolution: Resolution) -> Alternative | None:
    """A mean over weighted targets: the partial sums of the losses and of the weights."""
    func = call.func

    def run(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> Any:
        loss, total = func(x, target, weight, SUM, ignore)
        total = reduce_pending(func, total)
        return loss / total, total

    if call.named["reduction"] != MEAN or not isinstance(call.named["self"], DTensor):
        return None
    summed = OpCall(func, tuple((call.named | {"reduction": SUM}).values()), {})
    return None if resolve(summed) is None else Alternative(run)


ALTERNATIVES: dict[Any, Propose] = dict.fromkeys(
    (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll_mean
)
