"""The three ways between blocks and tensors, with their gradients.

The gradient of a DTensor is a DTensor of the same global shape, in any layout. What is pending in a value
is replicated in its gradient: each part of a sum changes the sum as much as the sum itself changes.
Each backward is made of these same functions, so all of them can be differentiated again and again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Pending, PerRank, cut_sparse, detached, is_sparse, on_mesh, run, start
from shardwise.layout import Layout, Spec, global_stride
from shardwise.plan import Plan, plan_redistribute
from shardwise.tensor.async_tensor import Awaited
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import made, moved, stride_of

__all__ = ["FromLocal", "Redistribute", "ToLocal", "contiguous_stride", "grad_layout", "redistributed"]


_new: Any = torch.Tensor._dtensor__new__  # without the detour through Python that `DTensor(…)` is


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return global_stride(shape, range(len(shape), 0, -1))


def grad_layout(layout: Layout) -> Layout:
    """The layout of a gradient: nothing of it is pending."""
    return layout.with_partial({})


def redistributed(x: DTensor, target: Layout) -> DTensor:
    """`x` in another layout, beneath autograd."""
    if x.layout is target:
        return x
    plan = _plan(x._spec, target, x.dtype)
    local = run(plan, x._local_tensor, x.device_mesh)
    return DTensor(local, x._spec.with_layout(target, contiguous_stride(target.shape)))


def _plan(spec: Spec, target: Layout, dtype: torch.dtype) -> Plan:
    return plan_redistribute(spec.layout, target, dtype.itemsize)


class Redistribute(torch.autograd.Function):
    """`apply(x, layout, async_op, forward_dtype, backward_dtype)`."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, target: Layout, async_op: bool, forward: torch.dtype, backward: torch.dtype
    ) -> DTensor:
        spec = x._spec
        ctx.source, ctx.dtype, ctx.dtypes, ctx.async_op = spec.layout, x.dtype, (forward, backward), async_op
        if spec.stride is None:
            return moved(x, target, forward)
        local = x._local_tensor
        if forward != x.dtype:
            local = local.to(forward)
        if target is spec.layout:
            same = spec if forward == x.dtype else spec.with_dtype(forward)
            return DTensor(local.view_as(local), same)
        spec = Spec(spec.mesh, target, forward, spec.shape, contiguous_stride(target.shape))
        go = start if async_op and not torch.compiler.is_compiling() else run
        there = go(_plan(x._spec, target, forward), local, spec.mesh)
        return Awaited(there, spec) if isinstance(there, Pending) else DTensor(there, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        forward, backward = ctx.dtypes
        target = grad_layout(ctx.source)
        out = Redistribute.apply(_ready_for(grad, target), target, ctx.async_op, backward, forward)  # type: ignore[no-untyped-call]
        return (out if out.dtype == ctx.dtype else out.to(ctx.dtype)), None, None, None, None


def _ready_for(grad: Any, target: Layout) -> Any:
    """A gradient that may be brought into a layout: dense, if no sparse tensor lies so."""
    if grad._spec.stride is not None or grad._spec.layout is target:
        return grad
    if torch.is_grad_enabled() or target.partial or grad._local_tensor.layout is not torch.sparse_coo:
        return grad.to_dense()
    # nobody differentiates it again, so each rank may make no more than its block
    block = on_mesh(grad.device_mesh, lambda c, t: cut_sparse(t, target, c).to_dense(), grad._local_tensor)
    if block is None:
        return grad.to_dense()
    spec = Spec(grad.device_mesh, target, grad.dtype, grad._spec.shape, contiguous_stride(grad.shape))
    return DTensor(block, spec)


def _blocks(local: Tensor) -> tuple[Tensor, ...]:
    return local.ranks if isinstance(local, PerRank) else (local,)


class ToLocal(torch.autograd.Function):
    """`apply(x, layout of the blocks' gradient or None)`: the block, or in a simulation one per rank."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, grads_lie: Layout | None) -> tuple[Tensor, ...]:
        ctx.spec = x._spec
        ctx.grads_lie = grads_lie
        local = x._local_tensor
        ctx.ranks = tuple(local._blocks) if isinstance(local, PerRank) else None
        ctx.set_materialize_grads(False)
        # fresh tensors: autograd writes its metadata into what is returned
        return tuple(map(detached, _blocks(local)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = next((g for g in grads if g is not None), None)
        if given is None:
            return None, None
        spec: Spec = ctx.spec
        layout, scale = (ctx.grads_lie, 1) if ctx.grads_lie is not None else _implied(spec.layout)
        if any(g is None for g in grads):
            grads = tuple(
                g if g is not None else _no_grad_block(spec, r) for g, r in zip(grads, ctx.ranks, strict=True)
            )
        sparse = [is_sparse(g) for g in grads]
        if any(sparse) and (layout.sharded or layout.partial or not all(sparse)):
            grads = tuple(g.to_dense() for g in grads)  # no sparse tensor lies so
        if scale != 1:
            grads = tuple(g * scale for g in grads)
        # the gradient of a sum is one number expanded; nothing could be accumulated into that
        grads = tuple(g.contiguous() if not is_sparse(g) and 0 in g.stride() else g for g in grads)
        given = grads[0]
        shape, stride = spec.shape, stride_of(given)
        if stride is not None:
            stride = global_stride(shape, stride) if given.dim() == len(shape) else contiguous_stride(shape)
        grad_spec = Spec(spec.mesh, layout, given.dtype, shape, stride)
        return FromLocal.apply(grad_spec, None, ctx.ranks, *grads), None  # type: ignore[no-untyped-call]


def _no_grad_block(spec: Spec, rank: int) -> Tensor:
    from shardwise.comm import members_of
    from shardwise.layout import block_shape

    return torch.zeros(block_shape(spec.layout, members_of(spec.mesh)[rank]), dtype=spec.dtype)


def _implied(layout: Layout) -> tuple[Layout, int]:
    """Where the gradient of a block lies if nobody says, and what to multiply it by."""
    ops = dict(layout.partial)
    if "product" in ops.values():
        raise RuntimeError(
            f"the gradient of a block of {layout} is not that of the tensor.\n"
            "  why: each factor of a pending product changes it by the product of the others\n"
            "  fix: redistribute to Replicate() before to_local, or pass grad_placements"
        )
    if set(ops.values()) & {"max", "min"}:
        # only the ranks that hold the extreme get a gradient, so the parts add up
        return layout.with_partial(dict.fromkeys(ops, "sum")), 1
    # a part of a mean counts for 1/n: the mean's own gradient is n times the part's
    return grad_layout(layout), math.prod(layout.axes.sizes[a] for a, op in ops.items() if op == "avg")


class FromLocal(torch.autograd.Function):
    """`apply(spec, layout of the blocks' gradient or None, ranks or None, *blocks)`."""

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, grads_lie: Layout | None, ranks: tuple[int, ...] | None, *blocks: Tensor
    ) -> DTensor:
        ctx.spec, ctx.grads_lie, ctx.ranks = spec, grads_lie, ranks
        ctx.set_materialize_grads(False)
        if spec.layout.partial and any(op in ("max", "min") for _, op in spec.layout.partial):
            ctx.save_for_backward(*blocks)
        if spec.stride is None:
            return made(_joined(ranks, tuple(map(detached, blocks))), spec)
        if ranks is None:
            return _new(DTensor, blocks[0].detach(), spec, False)  # type: ignore[no-any-return]
        return DTensor(_joined(ranks, tuple(b.view_as(b) for b in blocks)), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None:
            return (None, None, None, *([None] * (len(ctx.ranks) if ctx.ranks else 1)))
        layout: Layout = ctx.spec.layout
        target = ctx.grads_lie if ctx.grads_lie is not None else grad_layout(layout)
        there = Redistribute.apply(_ready_for(grad, target), target, False, grad.dtype, grad.dtype)  # type: ignore[no-untyped-call]
        # each rank's share of an extreme is its own, so what is said of them in a second backward adds up
        own = ctx.grads_lie is None and any(op in ("max", "min") for _, op in layout.partial)
        back = layout.with_partial({a: "sum" for a, _ in layout.partial}) if own else None
        out = ToLocal.apply(there, back)  # type: ignore[no-untyped-call]
        if ctx.grads_lie is None and layout.partial:
            out = _shared_out(ctx, layout, out)
        return (None, None, None, *out)


def _joined(ranks: tuple[int, ...] | None, blocks: tuple[Tensor, ...]) -> Tensor:
    return blocks[0] if ranks is None else PerRank(dict(zip(ranks, blocks, strict=True)))


def _shared_out(ctx: Any, layout: Layout, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a gradient of a reduced value means to each part of it."""
    ops = dict(layout.partial)
    if "product" in ops.values():
        raise RuntimeError(
            f"{layout} has no gradient here.\n"
            "  why: a factor of a pending product needs all the others to know its gradient\n"
            "  fix: multiply with an op on Shard or Replicate tensors, or pass grad_placements"
        )
    if set(ops.values()) & {"max", "min"}:
        shares = _shares_of_extreme(ctx.spec, ctx.ranks, ctx.saved_tensors)
        return tuple(g * s for g, s in zip(grads, shares, strict=True))
    n = math.prod(layout.axes.sizes[a] for a, op in ops.items() if op == "avg")
    return grads if n == 1 else tuple(g / n for g in grads)


def _shares_of_extreme(
    spec: Spec, ranks: tuple[int, ...] | None, blocks: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """1 where a part is the extreme, shared between the parts that are, as amax does."""
    mesh: DeviceMesh = spec.mesh
    whole = grad_layout(spec.layout)
    with torch.no_grad():
        extreme = run(_plan(spec, whole, spec.dtype), _joined(ranks, blocks), mesh)
        hits = tuple((b == e).to(spec.dtype) for b, e in zip(blocks, _blocks(extreme), strict=True))
        counted = spec.with_layout(spec.layout.with_partial({a: "sum" for a, _ in spec.layout.partial}))
        counts = run(_plan(counted, whole, spec.dtype), _joined(ranks, hits), mesh)
        return tuple(h / c for h, c in zip(hits, _blocks(counts), strict=True))
