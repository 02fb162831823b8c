"""Ops that take or make sparse tensors: on the whole, which every rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import LayoutError
from shardwise.tensor.direct import Run
from shardwise.tensor.sparse import holds_sparse
from shardwise.tensor.whole import on_whole, tensors_in

__all__ = ["is_about_sparse", "on_sparse"]

aten = torch.ops.aten


def is_about_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes a sparse tensor, or asks for one by its layout."""
    wanted = kwargs.get("layout")
    return wanted not in (None, torch.strided) or any(
        holds_sparse(t) for t in tensors_in([*args, *kwargs.values()])
    )


def on_sparse(func: Any) -> Run:
    """How such a call runs."""
    if func in _OWN:
        return _OWN[func]
    if torch.Tag.inplace_view in func.tags:
        raise LayoutError(
            f"{func} would change the shape of a sparse DTensor in place.",
            why="it is no view that could be seen in another shape",
            fix="use the op that returns a new tensor",
        )
    return lambda args, kwargs: on_whole(func, args, kwargs)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which kind of sparse a tensor is: torch asks by an op."""
    return args[0]._local_tensor.layout


def _room_for_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Room for a dense gradient of a sparse tensor, which torch takes for one of the tensor's own strides."""
    func = aten.new_empty_strided.default
    if torch._C._current_graph_task_id() != -1 and not holds_sparse(args[0]):
        return func(*args, **{k: v for k, v in kwargs.items() if k != "layout"})
    return on_whole(func, args, kwargs)


def _wanting_grad(func: Any) -> Run:
    """Where a kernel notes what its backward needs only if its inputs want a gradient, as blocks never do."""

    def noted(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return func(*(a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args))

    return lambda args, kwargs: on_whole(func, args, kwargs, run=noted)


_OWN: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.ops.prim.layout.default: _kind,
    aten.new_empty_strided.default: _room_for_grad,
    aten._sparse_mm_reduce_impl.default: _wanting_grad(aten._sparse_mm_reduce_impl.default),
}
