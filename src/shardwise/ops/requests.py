"""Ops that return values to the program: `item()`, `bool()`, `equal`. It requests them, so the policy does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import first_rank, map_ranks
from shardwise.layout import Layout, Spec
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute import to_layout

__all__ = ["REQUESTS"]

aten = torch.ops.aten


def _replicated(x: Any) -> Tensor:
    """The full tensor on each rank."""
    if not isinstance(x, DTensor):
        return x  # type: ignore[no-any-return]
    return to_layout(x, Layout.replicated(x.shape, x._spec.layout.axes))._local_tensor


def _item(x: Tensor) -> Any:
    return map_ranks(aten._local_scalar_dense.default, _replicated(x))


def _aligned(x: Tensor, y: Tensor) -> tuple[DTensor, DTensor]:
    """Two tensors of the same shape in one layout, without pending reductions."""
    reference: Any = x if isinstance(x, DTensor) else y
    layout = reference._spec.layout.with_partial({})
    if not (isinstance(x, DTensor) and isinstance(y, DTensor)):  # a plain tensor is replicated
        layout = Layout.replicated(x.shape, layout.axes)
    mesh = reference.device_mesh
    a, b = (to_layout(t if isinstance(t, DTensor) else replicate(t, mesh), layout) for t in (x, y))
    return a, b


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal: each rank compares its blocks, and one number is reduced."""
    if x.shape != y.shape:
        return False
    a, b = _aligned(x, y)
    same = map_ranks(
        lambda s, t: torch.tensor(torch.equal(s, t), dtype=torch.int32, device=s.device),
        a._local_tensor,
        b._local_tensor,
    )
    layout = a._spec.layout
    replicated = Layout.replicated((), layout.axes)
    pending = replicated.with_partial(dict.fromkeys(layout.sharded, "min"))
    verdict = DTensor(same, Spec(a.device_mesh, pending, torch.int32, torch.Size(()), ()))
    return bool(first_rank(to_layout(verdict, replicated)._local_tensor).item())


def _allclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether two tensors are close: each rank compares its blocks, and one number is reduced."""
    if x.shape == y.shape:
        x, y = _aligned(x, y)
    return bool(first_rank(_replicated(torch.isclose(x, y, rtol, atol, equal_nan).all())).item())


REQUESTS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
}
"""By op."""
