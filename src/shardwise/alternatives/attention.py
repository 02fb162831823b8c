"""Attention with fewer key heads than ranks: keys are repeated for each of their queries, so that queries stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.call.op_call import OpCall
from shardwise.plan.settings import override_settings

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _group(query: Tensor, key: Tensor, value: Tensor) -> int | None:
    """How many query heads share a key head; None if each has its own, or if all share one, which the rule handles."""
    heads, keys = query.shape[1], key.shape[1]
    if query.dim() != 4 or keys < 2 or heads <= keys or heads % keys or value.shape[1] != keys:
        return None
    return heads // keys


def _repeated(x: Tensor, group: int) -> Tensor:
    """Each head of (batch, heads, length, features), repeated."""
    return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _summed(x: Tensor, group: int) -> Tensor:
    """The sums of adjacent heads: the gradient of `_repeated`. Where heads are split, each rank has a term of them."""
    shape = (x.shape[0], x.shape[1] // group, *x.shape[2:])
    head = torch.arange(shape[1], device=x.device).repeat_interleave(group)
    with override_settings(plain="replicate"):
        return x.new_zeros(shape).index_add(1, head, x)


def _forward(call: OpCall, resolution: Any) -> Alternative | None:
    func, group = call.func, _group(*call.args[:3])
    if group is None:
        return None

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        return func(query, _repeated(key, group), _repeated(value, group), *rest, **options)

    return Alternative(run)


def _backward(call: OpCall, resolution: Any) -> Alternative | None:
    func, group = call.func, _group(*call.args[1:4])
    if group is None:
        return None

    def run(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        result = func(grad, query, _repeated(key, group), _repeated(value, group), *rest, **options)
        return result[0], _summed(result[1], group), _summed(result[2], group)

    return Alternative(run)


ALTERNATIVES: dict[Any, Propose] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
