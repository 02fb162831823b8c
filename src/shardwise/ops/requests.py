"""Ops by which a program asks for values: `item()`, `bool()`, `equal`. They communicate because they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import PerRank, map_ranks
from shardwise.layout import Layout, Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute import to_layout

__all__ = ["REQUESTS"]

aten = torch.ops.aten


def _replicated(x: Any) -> Tensor:
    """The full tensor on each rank."""
    return (
        to_layout(x, Layout.replicated(x.shape, x._spec.layout.axes))._local_tensor
        if isinstance(x, DTensor)
        else x
    )


def _item(x: Tensor) -> Any:
    return map_ranks(aten._local_scalar_dense.default, _replicated(x))


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal: each rank compares its blocks, and one number is reduced."""
    reference = x if isinstance(x, DTensor) else y
    if x.shape != y.shape or not isinstance(reference, DTensor):
        return False
    if isinstance(x, DTensor) and isinstance(y, DTensor):
        layout = reference._spec.layout.with_partial({})
        blocks = [to_layout(t, layout)._local_tensor for t in (x, y)]
    else:  # a plain tensor is replicated
        layout = Layout.replicated(x.shape, reference._spec.layout.axes)
        blocks = [_replicated(x), _replicated(y)]
    same = map_ranks(
        lambda a, b: torch.tensor(torch.equal(a, b), dtype=torch.int32, device=a.device), *blocks
    )
    replicated = Layout.replicated((), layout.axes)
    pending = replicated.with_partial(dict.fromkeys(layout.sharded, "min"))
    spec = Spec(reference.device_mesh, pending, torch.int32, torch.Size(()), ())
    verdict = to_layout(DTensor(same, spec), replicated)._local_tensor
    return bool((verdict.ranks[0] if isinstance(verdict, PerRank) else verdict).item())


REQUESTS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
}
"""By op."""
