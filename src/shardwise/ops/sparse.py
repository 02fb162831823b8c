"""Ops that take or make sparse tensors: on the whole, which every rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.fallback import on_whole, replicated_like, tensors_in, written_by
from shardwise.dispatch.fast_path import Run
from shardwise.ops.sparse_dense import ON_BLOCKS
from shardwise.tensor.sparse_tensor import holds_sparse, made

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
    split = ON_BLOCKS.get(func)

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if split is not None and (done := split(func, args, kwargs)) is not None:
            return done
        result = on_whole(func, args, kwargs)
        for t in written_by(func, args, kwargs):
            # sparse tensors may be resized, and turned, in place
            if holds_sparse(t) and t._local_tensor.shape != t.shape:
                t.data = made(t._local_tensor, replicated_like(t._local_tensor, t.device_mesh))
        return result

    return go


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


_OWN: dict[Any, Run] = {
    torch.ops.prim.layout.default: _kind,
    aten.new_empty_strided.default: _room_for_grad,
    aten._sparse_mm_reduce_impl.default: _wanting_grad(aten._sparse_mm_reduce_impl.default),
}
