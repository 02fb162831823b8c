"""Renormalization of the rows of a split embedding table, and distances, without gathering."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose, reduce_pending
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.layout import Layout
from shardwise.layout.sizes import same_sizes
from shardwise.tensor.construct import from_function
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _renorm(table: DTensor, indices: Tensor, max_norm: float, norm_type: float) -> DTensor:
    """Scale down the rows that are looked up, each where it is."""
    layout, device = table._spec.layout, indices.device
    none = from_function(
        Layout(layout.axes, layout.dims[:1]),
        lambda shape, owned: torch.zeros(shape, dtype=torch.bool, device=device),
        torch.bool,
        False,
        table.device_mesh,
    )
    is_used = none.index_fill(0, indices.reshape(-1), True).unsqueeze(1)
    norm = torch.linalg.vector_norm(table, norm_type, 1, keepdim=True)
    norm = reduce_pending(aten.embedding_renorm_.default, norm)
    table.mul_(torch.where(is_used & (norm > max_norm), max_norm / (norm + 1e-7), 1.0))
    return table


def _propose_renorm(call: OpCall, resolution: Resolution | None) -> Alternative | None:
    table = call.named["self"]
    if not isinstance(table, DTensor) or table._spec.layout.partial or 0 in table.shape:
        return None
    return Alternative(_renorm) if table.dtype in (torch.float32, torch.float64) else None


def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - y, p)  # type: ignore[no-any-return]


def _propose_dist(call: OpCall, resolution: Resolution | None) -> Alternative | None:
    x, y = call.named["self"], call.named["other"]
    if (
        not isinstance(x, DTensor)
        or not isinstance(y, DTensor)
        or not same_sizes(x.shape, y.shape)
        or 0 in x.shape
    ):
        return None
    if x.dtype != y.dtype or x.dtype not in (torch.float32, torch.float64):
        return None
    return None if x._spec.layout.partial or y._spec.layout.partial else Alternative(_dist)


ALTERNATIVES: dict[Any, Propose] = {
    aten.embedding_renorm_.default: _propose_renorm,
    aten.dist.default: _propose_dist,
}
