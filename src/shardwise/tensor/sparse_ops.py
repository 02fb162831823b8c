"""Ops that take or make sparse tensors: on the whole, which every rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import cut_sparse, map_ranks, on_mesh, places_in, sparse_of
from shardwise.layout import Layout, Spec
from shardwise.plan import plan_redistribute
from shardwise.tensor.autograd import contiguous_stride, redistributed
from shardwise.tensor.direct import Run
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind
from shardwise.tensor.rungs import tell
from shardwise.tensor.sparse import holds_sparse, made
from shardwise.tensor.whole import on_whole, replicated_like, returned_by, tensors_in, written_by

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

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _adding(func: Any) -> Run:
    """A sparse tensor added to a dense one: each rank adds what is in its block."""

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, y = args[:2]
        here = isinstance(x, DTensor) and isinstance(y, DTensor) and not holds_sparse(x)
        if not here or y._local_tensor.layout is not torch.sparse_coo or not _is_cut_alone(x, y):
            return on_whole(func, args, kwargs)
        tell(func, "offer", args, kwargs)
        layout = x._spec.layout

        def local(coord: Any, block: Tensor, whole: Tensor) -> Tensor:
            return func(block, cut_sparse(whole, layout, coord), *args[2:], **kwargs)  # type: ignore[no-any-return]

        block = on_mesh(x.device_mesh, local, x._local_tensor, y._local_tensor)
        target = returned_by(func, args, kwargs)
        return DTensor(block, x._spec.with_dtype(block.dtype)) if target is None else target

    return go


def _is_cut_alone(x: DTensor, y: DTensor) -> bool:
    layout = x._spec.layout
    return x.shape == y.shape and bool(layout.sharded) and not layout.partial


def _masked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The elements of a dense tensor that a mask has: each rank looks up its own, and they are added up."""
    x, mask = args[:2]
    func = aten.sparse_mask.default
    here = isinstance(x, DTensor) and isinstance(mask, DTensor) and not holds_sparse(x)
    if not here or mask._local_tensor.layout is not torch.sparse_coo or not _is_cut_alone(x, mask):
        return on_whole(func, args, kwargs)
    layout, deep = x._spec.layout, mask.sparse_dim()
    if any(f.axes for dim in layout.dims[deep:] for f in dim):
        return on_whole(func, args, kwargs)

    def local(coord: Any, block: Tensor, kept: Tensor) -> Tensor:
        inside, here = places_in(kept._indices(), layout, coord)
        found = block.new_zeros(kept._values().shape)
        found[inside] = block[tuple(here[:, inside])]
        return found

    found = on_mesh(x.device_mesh, local, x._local_tensor, mask._local_tensor)
    shape = found.shape
    axes = layout.axes
    pending = Layout.replicated(shape, axes).with_partial(dict.fromkeys(layout.sharded, "sum"))
    spec = Spec(x.device_mesh, pending, x.dtype, shape, contiguous_stride(shape))
    whole = Layout.replicated(shape, axes)
    plan = plan_redistribute(pending, whole, x.dtype.itemsize)
    mind(func, [plan])
    tell(func, "offer", args, kwargs, [plan])
    values = redistributed(DTensor(found, spec), whole)._local_tensor
    result = map_ranks(_with_values, mask._local_tensor, values)
    return made(result, replicated_like(result, x.device_mesh))


def _with_values(t: Tensor, values: Tensor) -> Tensor:
    return sparse_of([t._indices(), values], t, t.is_coalesced())


_OWN: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.ops.prim.layout.default: _kind,
    aten.new_empty_strided.default: _room_for_grad,
    aten.add.Tensor: _adding(aten.add.Tensor),
    aten.add_.Tensor: _adding(aten.add_.Tensor),
    aten.sub.Tensor: _adding(aten.sub.Tensor),
    aten.sub_.Tensor: _adding(aten.sub_.Tensor),
    aten.sparse_mask.default: _masked,
    aten._sparse_mm_reduce_impl.default: _wanting_grad(aten._sparse_mm_reduce_impl.default),
}
