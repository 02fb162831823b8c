"""Writing one number to all elements of a tensor with pending reductions, without reducing what it held."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import map_ranks
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _fill(x: DTensor, value: Any) -> DTensor:
    """Write terms whose reduction is the number."""
    numbers = torch.full_like(x, value)
    terms = to_layout(aten.fill_.Scalar, numbers, x._spec.layout)  # type: ignore[arg-type]
    map_ranks(aten.copy_.default, x._local_tensor, terms._local_tensor)
    return x


def _propose(call: OpCall, resolution: Resolution | None) -> Alternative | None:
    x = call.named["self"]
    if not isinstance(x, DTensor) or not x._spec.layout.partial or len(call.tensors) > 1:
        return None
    return Alternative(_fill, (), (x._spec,))


ALTERNATIVES: dict[Any, Propose] = {aten.fill_.Scalar: _propose}
