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


def _nll_mean(func: Any) -> Propose:
    """A mean over weighted targets: the partial sums of the losses and of the weights."""

    def run(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> Any:
        loss, total = func(x, target, weight, SUM, ignore)
        total = reduce_pending(func, total)
        return loss / total, total

    def propose(call: OpCall, resolution: Resolution | None) -> Alternative | None:
        if call.named["reduction"] != MEAN or not isinstance(call.named["self"], DTensor):
            return None
        summed = OpCall(func, tuple((call.named | {"reduction": SUM}).values()), {})
        return None if resolve(summed) is None else Alternative(run)

    return propose


ALTERNATIVES: dict[Any, Propose] = {
    op: _nll_mean(op) for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
}
