"""`from_local` and `to_local` as autograd functions: they connect the graphs of blocks and of DTensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, detached, is_sparse, members_of
from shardwise.comm.run import run
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout, Spec, block_shape, contiguous_stride, global_stride, without_pending
from shardwise.layout.sizes import as_sizes, cached
from shardwise.plan import plan_redistribute
from shardwise.tensor.construct import from_block, stride_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.inference import note_inference_mode
from shardwise.tensor.observe import observers
from shardwise.tensor.redistribute import Redistribute, densify, grad_layout, move
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.autograd_function import applied_directly
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["FromLocal", "ToLocal", "join_blocks"]


def _blocks(local: Tensor) -> tuple[Tensor, ...]:
    return local.ranks if isinstance(local, PerRank) else (local,)


def _is_final(grad: Tensor) -> bool:
    """Whether a gradient is not differentiated again, so that its conversion needs no node."""
    return not torch.is_grad_enabled() and not has_tangent(grad)


def join_blocks(ranks: tuple[int, ...] | None, blocks: tuple[Tensor, ...]) -> Tensor:
    """The blocks of some simulated ranks as one tensor; without ranks, the only block."""
    return blocks[0] if ranks is None else PerRank(dict(zip(ranks, blocks, strict=True)))


@applied_directly
class ToLocal(torch.autograd.Function):
    """`apply(x, layout of the blocks' gradient or None)`: the block, or in a simulation one per rank."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, grads_layout: Layout | None) -> tuple[Tensor, ...]:
        ctx.spec = x._spec
        ctx.grads_layout = grads_layout
        local = x._local_tensor
        ctx.ranks = tuple(local._blocks) if isinstance(local, PerRank) else None
        ctx.set_materialize_grads(False)
        # new tensors: autograd writes its metadata into the results
        return tuple(map(detached, _blocks(local)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = next((g for g in grads if g is not None), None)
        if given is None:
            return None, None
        spec: Spec = ctx.spec
        layout, scale = (ctx.grads_layout, 1) if ctx.grads_layout else _implied_gradient(spec.layout)
        if any(g is None for g in grads):
            pairs = zip(grads, ctx.ranks, strict=True)
            grads = tuple(_zero_grad(spec, r) if g is None else g for g, r in pairs)
        sparse = [is_sparse(g) for g in grads]
        if any(sparse) and (layout.sharded or layout.partial or not all(sparse)):
            grads = tuple(g.to_dense() for g in grads)  # sparse tensors are replicated only
        if scale != 1:
            grads = tuple(g * scale for g in grads)
        # the gradient of a sum is one number expanded, into which nothing can be accumulated
        grads = tuple(g.contiguous() if not is_sparse(g) and 0 in g.stride() else g for g in grads)
        given = grads[0]
        stride = stride_of(given)
        if spec.is_symbolic and stride is not None:
            stride = as_sizes(stride)
        grad_spec = _gradient_spec(spec, layout, given.dtype, stride)
        if observers:
            observers[-1].claim(join_blocks(ctx.ranks, grads), grad_spec, "the gradient of a to_local")
        if ctx.ranks is None and stride is not None and _is_final(given):
            return new_dtensor(DTensor, given.detach(), grad_spec, False), None
        return FromLocal.apply(grad_spec, None, ctx.ranks, *grads), None  # type: ignore[no-untyped-call]


@cached(4096)
def _gradient_spec(spec: Spec, layout: Layout, dtype: torch.dtype, stride: tuple[int, ...] | None) -> Spec:
    """The spec of a gradient in a layout, whose blocks have these strides; None for sparse ones."""
    shape = spec.shape
    if stride is not None:
        stride = global_stride(shape, stride) if len(stride) == len(shape) else contiguous_stride(shape)
    return Spec(spec.mesh, layout, dtype, shape, stride, without_pending(spec.units))


at_simulation_end(_gradient_spec.cache_clear)


def _zero_grad(spec: Spec, rank: int) -> Tensor:
    return torch.zeros(block_shape(spec.layout, members_of(spec.mesh)[rank]), dtype=spec.dtype)


@cached(4096)
def _implied_gradient(layout: Layout) -> tuple[Layout, int]:
    """The layout of the blocks' gradient if none is given, and the factor to multiply it by."""
    ops = dict(layout.partial)
    if "product" in ops.values():
        raise RuntimeError(
            f"The gradient of {layout} cannot be computed from that of its blocks.\n"
            "  why: Each factor of a pending product changes it by the product of the others.\n"
            "  fix: Redistribute to Replicate() before to_local, or pass grad_placements."
        )
    if set(ops.values()) & {"max", "min"}:
        # only the ranks that hold the maximum or minimum get a gradient, so the gradients add up
        return layout.with_partial(dict.fromkeys(ops, "sum")), 1
    # each term of a mean counts for 1/n, so the gradient of the mean is n times that of a term
    return grad_layout(layout), math.prod(layout.axes.sizes[a] for a, op in ops.items() if op == "avg")


@applied_directly
class FromLocal(torch.autograd.Function):
    """`apply(spec, layout of the blocks' gradient or None, ranks or None, *blocks)`."""

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, grads_layout: Layout | None, ranks: tuple[int, ...] | None, *blocks: Tensor
    ) -> DTensor:
        ctx.spec, ctx.grads_layout, ctx.ranks = spec, grads_layout, ranks
        ctx.set_materialize_grads(False)
        if spec.layout.partial and any(op in ("max", "min") for _, op in spec.layout.partial):
            ctx.save_for_backward(*blocks)
        if spec.stride is None:
            return from_block(join_blocks(ranks, tuple(map(detached, blocks))), spec)
        if ranks is None:
            note_inference_mode()
            return new_dtensor(DTensor, blocks[0].detach(), spec, False)  # type: ignore[no-any-return]
        return DTensor(join_blocks(ranks, tuple(b.view_as(b) for b in blocks)), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None:
            return (None, None, None, *([None] * (len(ctx.ranks) if ctx.ranks else 1)))
        layout: Layout = ctx.spec.layout
        target = ctx.grads_layout if ctx.grads_layout is not None else grad_layout(layout)
        if ctx.ranks is None and not layout.partial and _is_final(grad):
            moved = densify(grad, target)
            if moved._spec.layout is not target:
                moved = move(moved, target, (), False, grad.dtype)
            return None, None, None, detached(moved._local_tensor)
        moved = Redistribute.apply(densify(grad, target), target, (), False, grad.dtype, grad.dtype)  # type: ignore[no-untyped-call]
        # each rank has its own share of a maximum or minimum, so gradients in a second backward pass add up
        shared = ctx.grads_layout is None and any(op in ("max", "min") for _, op in layout.partial)
        back = layout.with_partial({a: "sum" for a, _ in layout.partial}) if shared else None
        out = ToLocal.apply(moved, back)  # type: ignore[no-untyped-call]
        if ctx.grads_layout is None and layout.partial:
            out = _gradient_of_terms(ctx, layout, out)
        return (None, None, None, *out)


def _gradient_of_terms(ctx: Any, layout: Layout, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the terms of a pending reduction, from the gradient of its value."""
    ops = dict(layout.partial)
    if "product" in ops.values():
        raise RuntimeError(
            f"from_local of {layout} has no gradient.\n"
            "  why: The gradient of one factor of a pending product depends on all the others.\n"
            "  fix: Multiply Shard or Replicate tensors with an op instead, or pass grad_placements."
        )
    if set(ops.values()) & {"max", "min"}:
        shares = _shares_of_extremum(ctx.spec, ctx.ranks, ctx.saved_tensors)
        return tuple(g * s for g, s in zip(grads, shares, strict=True))
    n = math.prod(layout.axes.sizes[a] for a, op in ops.items() if op == "avg")
    return grads if n == 1 else tuple(g / n for g in grads)


def _shares_of_extremum(
    spec: Spec, ranks: tuple[int, ...] | None, blocks: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """For each term 1 where it is the maximum or minimum, divided by the number of terms that are, as in `amax`."""
    mesh: DeviceMesh = spec.mesh
    target, itemsize = grad_layout(spec.layout), spec.dtype.itemsize
    with torch.no_grad():
        value = run(plan_redistribute(spec.layout, target, itemsize), join_blocks(ranks, blocks), mesh)
        hits = tuple((b == e).to(spec.dtype) for b, e in zip(blocks, _blocks(value), strict=True))
        summed = spec.layout.with_partial({a: "sum" for a, _ in spec.layout.partial})
        counts = run(plan_redistribute(summed, target, itemsize), join_blocks(ranks, hits), mesh)
        return tuple(h / c for h, c in zip(hits, _blocks(counts), strict=True))
