"""Redistribution as the program asks for it by name, with its gradient.

The gradient of a DTensor is a DTensor of the same global shape, in any layout. Where a value is a pending reduction its
gradient is replicated: each partial value changes the sum as much as the sum itself changes. The backward pass is made
of the same functions, so it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Pending, check_reducible, cut_sparse, on_mesh
from shardwise.comm.run import run, start
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import (
    Layout,
    LayoutError,
    Placement,
    Spec,
    UnitPlacements,
    contiguous_stride,
    unit_placements,
    without_pending,
)
from shardwise.layout.sizes import cached
from shardwise.plan import plan_redistribute
from shardwise.tensor.async_tensor import AsyncDTensor
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import MeshError
from shardwise.tensor.inference import note_inference_mode
from shardwise.tensor.recorded_calls import record_move, recorder_of
from shardwise.tensor.sparse_tensor import redistribute_sparse
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.autograd_function import applied_directly
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["Redistribute", "densify", "grad_layout", "move", "redistribute", "returned_layout", "to_layout"]


def redistribute(
    x: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    axes: Mapping[str, Placement] | None,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    """See `DTensor.redistribute`; `axes=None` stands for a fully replicated target."""
    spec = x._spec
    if mesh is not None and mesh is not spec.mesh:
        _check_mesh(x, mesh)
    units: UnitPlacements = ()
    if axes is None:
        target = Layout.replicated(spec.layout.shape, spec.layout.axes)
    else:
        target, units = _target(spec.layout, spec.units, *_check_target(placements, axes))
    if target.partial:
        for _, op in target.partial:
            check_reducible(forward_dtype or spec.dtype, op)
    dtype = forward_dtype or spec.dtype
    if torch.is_grad_enabled() and (x.requires_grad or has_tangent(x)):
        return Redistribute.apply(x, target, units, async_op, dtype, backward_dtype or spec.dtype)  # type: ignore[no-any-return, no-untyped-call]
    return move(x, target, units, async_op, dtype)


def _check_mesh(x: DTensor, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"redistribute got {mesh!r} as its mesh.",
            why="The first argument is the mesh, the second the placements.",
            fix="x.redistribute(placements=[...]), or by axis: x.redistribute(tp=Shard(0))",
        )
    if mesh != x.device_mesh:
        raise MeshError(
            f"redistribute of {x._spec} got another mesh, {mesh}.",
            why=f"The tensor is on {x.device_mesh}, and a redistribution moves blocks within one mesh.",
            fix="distribute_tensor(x.full_tensor(), mesh, placements, src_data_rank=None)",
        )


def _check_target(
    placements: Sequence[Placement] | None, axes: Mapping[str, Placement]
) -> tuple[tuple[Placement, ...] | None, tuple[tuple[str, Placement], ...]]:
    if placements is None and not axes:
        raise LayoutError(
            "placements is needed for redistribute!",
            why="Neither placements nor a mesh axis was given.",
            fix="x.redistribute(placements=[Shard(0), ...]), or by axis: x.redistribute(tp=Shard(0))",
        )
    if placements is not None and axes:
        raise LayoutError(
            f"redistribute got placements and also {', '.join(axes)}.",
            why="The target is given once: as placements for all axes, or axis by axis.",
            fix="Leave one of the two out.",
        )
    listed = placements if placements is None or not isinstance(placements, Sequence) else tuple(placements)
    return listed, tuple(axes.items())


@cached(4096)
def _target(
    layout: Layout,
    current: UnitPlacements,
    placements: tuple[Placement, ...] | None,
    axes: tuple[tuple[str, Placement], ...],
) -> tuple[Layout, UnitPlacements]:
    """The layout and the placements on axes of size 1 that a redistribution asks for."""
    if placements is None:
        changed = list(layout.placements)
        for axis, placement in current:
            changed[axis] = placement
        for name, placement in axes:
            changed[layout.axes.index(name)] = placement
        placements = tuple(changed)
    target = Layout.of(layout.shape, layout.axes, placements)
    return target, unit_placements(target, placements)


@cached(4096)
def grad_layout(layout: Layout) -> Layout:
    """The layout of a gradient: it has no pending reductions."""
    return layout.with_partial({})


@cached(4096)
def returned_layout(source: Layout, target: Layout, grad: Layout) -> Layout:
    """The layout in which a gradient returns to the source of a redistribution to a target.

    Where all three are pending sums, or averages, nothing was done and the terms go back as they are.
    """
    pending = {a: op for a, op in source.partial if op in ("sum", "avg")}
    for layout in (target, grad):
        there = dict(layout.partial)
        pending = {a: op for a, op in pending.items() if there.get(a) == op}
    return source.with_partial(pending)


def to_layout(x: DTensor, target: Layout) -> DTensor:
    """A tensor in another layout, beneath autograd."""
    spec = x._spec
    if spec.layout is target:
        return x
    plan = plan_redistribute(spec.layout, target, spec.dtype.itemsize)
    local = run(plan, x._local_tensor, spec.mesh)
    return new_dtensor(DTensor, local, _moved_spec(spec, target, spec.dtype, spec.units), False)  # type: ignore[no-any-return]


@cached(4096)
def _moved_spec(spec: Spec, target: Layout, dtype: torch.dtype, units: UnitPlacements) -> Spec:
    """The spec of a tensor after it moved. Cached, because specs are interned only while something refers to them."""
    return Spec(spec.mesh, target, dtype, spec.shape, contiguous_stride(target.shape), units)


at_simulation_end(_moved_spec.cache_clear)


def move(x: DTensor, target: Layout, units: UnitPlacements, async_op: bool, dtype: torch.dtype) -> DTensor:
    """A new DTensor in another layout and dtype, beneath autograd."""
    spec = x._spec
    if spec.stride is None:
        return redistribute_sparse(x, target, dtype)
    if (mode := recorder_of(x)) is not None:
        return record_move(mode, move, x, target, units, dtype)
    local = x._local_tensor
    if dtype is not spec.dtype:
        local = local.to(dtype)
    if target is spec.layout:
        after = spec if dtype is spec.dtype else spec.with_dtype(dtype)
        return DTensor(local.view_as(local), after.with_units(units))
    plan = plan_redistribute(spec.layout, target, dtype.itemsize)
    after = _moved_spec(spec, target, dtype, units)
    if not async_op or torch.compiler.is_compiling():
        note_inference_mode()
        return new_dtensor(DTensor, run(plan, local, spec.mesh), after, False)  # type: ignore[no-any-return]
    block = start(plan, local, spec.mesh)
    return AsyncDTensor(block, after) if isinstance(block, Pending) else DTensor(block, after)


@applied_directly
class Redistribute(torch.autograd.Function):
    """`apply(x, layout, placements on axes of size 1, async_op, forward_dtype, backward_dtype)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        target: Layout,
        units: UnitPlacements,
        async_op: bool,
        forward: torch.dtype,
        backward: torch.dtype,
    ) -> DTensor:
        ctx.source, ctx.target, ctx.dtype, ctx.dtypes = x._spec.layout, target, x.dtype, (forward, backward)
        ctx.async_op, ctx.units = async_op, without_pending(x._spec.units)
        return move(x, target, units, async_op, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        forward, backward = ctx.dtypes
        target = returned_layout(ctx.source, ctx.target, grad._spec.layout)
        grad = densify(grad, target)
        if torch.is_grad_enabled() or has_tangent(grad):
            out = Redistribute.apply(grad, target, ctx.units, ctx.async_op, backward, forward)  # type: ignore[no-untyped-call]
        else:  # this gradient is not differentiated again
            out = move(grad, target, ctx.units, ctx.async_op, backward)
        return (out if out.dtype == ctx.dtype else out.to(ctx.dtype)), None, None, None, None, None


def densify(grad: Any, target: Layout) -> Any:
    """A gradient that can be redistributed to a layout: dense, unless the layout is one that sparse tensors have."""
    if grad._spec.stride is not None or grad._spec.layout is target:
        return grad
    if torch.is_grad_enabled() or target.partial or grad._local_tensor.layout is not torch.sparse_coo:
        return grad.to_dense()
    # it is not differentiated again, so each rank may densify its own block only
    block = on_mesh(grad.device_mesh, lambda c, t: cut_sparse(t, target, c).to_dense(), grad._local_tensor)
    if block is None:
        return grad.to_dense()
    spec = Spec(grad.device_mesh, target, grad.dtype, grad._spec.shape, contiguous_stride(grad.shape))
    return DTensor(block, spec)
