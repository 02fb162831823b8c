"""Tables of embeddings whose looked-up rows are kept short, and distances: where they lie, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Maker, Offer, exchange_seconds, seconds_of, settled
from shardwise.call.fallback import gathered, plans_to_whole
from shardwise.call.resolve import Prepared
from shardwise.comm import PerRank, map_ranks, members_of, spread
from shardwise.layout import Layout, Spec
from shardwise.plan import plan_redistribute
from shardwise.tensor.autograd import redistributed
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["OFFERS"]

aten = torch.ops.aten


def _renorm(table: DTensor, indices: Tensor, max_norm: float, norm_type: float) -> DTensor:
    """Rows that are looked up are scaled down where they lie; all ranks know which."""
    func = aten.embedding_renorm_.default
    mind(func, plans_to_whole([indices]))
    whole = gathered(func, indices) if isinstance(indices, DTensor) else indices
    size, mesh = table.shape[0], table.device_mesh
    seen = map_ranks(lambda i: i.new_zeros(size, dtype=torch.bool).index_fill_(0, i.reshape(-1), True), whole)
    if isinstance(table._local_tensor, PerRank) and not isinstance(seen, PerRank):
        seen = spread(seen, list(members_of(mesh)))
    axes = table.layout.axes
    spec = Spec(mesh, Layout.replicated((size,), axes), torch.bool, torch.Size((size,)), (1,))
    looked = redistributed(DTensor(seen, spec), Layout(axes, [table.layout.dims[0]])).unsqueeze(1)
    norm = settled(func, torch.linalg.vector_norm(table, norm_type, 1, keepdim=True))
    scale = torch.where(looked & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
    table.mul_(scale)
    return table


def _renormed(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
    table, indices = args[:2]
    if kwargs or not isinstance(table, DTensor) or table._spec.layout.partial or 0 in table.shape:
        return None
    if table.dtype not in (torch.float32, torch.float64):
        return None
    seconds = seconds_of(plans_to_whole([indices]))
    if any(f.axes for f in table._spec.layout.dims[1]):
        seconds += exchange_seconds(table._spec.layout, 1, table.shape[0], table.dtype.itemsize)
    return Offer(seconds, _renorm)


def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - y, p)  # type: ignore[no-any-return]


def _apart(args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Prepared | None) -> Offer | None:
    x, y = args[:2]
    if not isinstance(x, DTensor) or not isinstance(y, DTensor) or x.shape != y.shape or kwargs:
        return None
    if x.dtype != y.dtype or x.dtype not in (torch.float32, torch.float64) or 0 in x.shape:
        return None
    if x._spec.layout.partial or y._spec.layout.partial:
        return None
    meet = plan_redistribute(y._spec.layout, x._spec.layout, x.dtype.itemsize)
    return Offer(seconds_of([meet]) + exchange_seconds(x._spec.layout, 1, 1, x.dtype.itemsize), _dist)


OFFERS: dict[Any, Maker] = {aten.embedding_renorm_.default: _renormed, aten.dist.default: _apart}
