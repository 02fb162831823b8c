"""Expert parallelism: tokens go to the ranks that hold their experts, and weights stay where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, block_of, exchange_rows, on_mesh
from shardwise.layout import Factor, Layout, Partial
from shardwise.parallel.boundary import Boundary
from shardwise.parallel.module_tensors import Slot, slots_of
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.modules import own_parameters, set_parameter

__all__ = ["holds_experts", "run_experts"]


def holds_experts(module: nn.Module, layouts: dict[str, Layout], axis: int) -> bool:
    """Whether an axis splits the experts of a module: dim 0 of all its parameters that have a row for each expert.

    Args:
        module: a module with an attribute `num_experts`, as the experts of Hugging Face's models have it.
        layouts: the layouts of its own parameters, by name.
        axis: the axis.
    """
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or not any(len(layout.shape) == 3 for layout in layouts.values()):
        return False
    return all(
        layout.shape[:1] == (count,)
        and layout.sharded == {axis}
        and layout.dims[0] == (Factor(count, (axis,)),)
        for layout in layouts.values()
    )


def run_experts(
    original: Callable[..., Any],
    module: nn.Module,
    boundary: Boundary,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the forward method of a module of experts, on each rank for the tokens of its own experts.

    The method takes tokens (T, H), for each the experts (T, K) and their weights (T, K), and returns the weighted sums (T, H). Each rank
    calls it with the pairs of its own experts, as tokens with one expert each. The results of all ranks
    are added, as the boundary says, or in the tokens' own layout if the axis splits them. Experts whose method takes other
    arguments, or which draw random numbers, run op by op.

    If the axis splits the tokens, each is sent by an all-to-all to the ranks that have experts of it, once for each rank, and the
    sums come back the same way. Otherwise the sum of the results is reduced, and in the backward pass that of the gradients of
    tokens and routing weights. Weights of experts and their gradients are not sent.
    """
    given = _routed_tokens(original, (module, *args), kwargs)
    on = None if given is None else boundary.on(given[0].device_mesh)
    if given is None or on is None or not _runs_on_own_experts(module, given, on):
        args, kwargs = boundary.enter(args, kwargs)
        return boundary.leave(original(module, *args, **kwargs))
    before, boundary = given[0].sharding, on
    if any(boundary.axis in f.axes for f in before.dims[0]):
        out = _exchanged_sum(original, module, boundary.axis, *_on_rows(given, boundary, before.dims[0]))
    else:
        kept = [Factor(f.size, tuple(a for a in f.axes if a != boundary.axis)) for f in before.dims[0]]
        out = _sum_of_experts(original, module, boundary.axis, *_on_rows(given, boundary, kept))
    if boundary.axis in before.sharded:
        return out if out.sharding is before else out.redistribute(placements=before.placements)
    return boundary.leave(out)


def _routed_tokens(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, Tensor, Tensor] | None:
    """The tokens, the indices of their experts and the routing weights, or None if the call is of another kind."""
    try:
        bound = _signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return None  # the method itself says what is wrong
    given = list(bound.values())[1:]
    if len(given) != 3 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in given):
        return None
    x, index, weights = given
    if not isinstance(x, DTensor) or index.shape != weights.shape:
        return None
    if index.is_floating_point() or not weights.is_floating_point() or index.shape[0] != x.shape[0]:
        return None
    return x, index, weights


def _runs_on_own_experts(module: nn.Module, given: Sequence[Tensor], boundary: Boundary) -> bool:
    """Whether each rank can run the module for its own experts: it has them, and the module draws no random numbers."""
    if any(isinstance(t, DTensor) and t.device_mesh is not boundary.mesh for t in given):
        return False
    random = module.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())
    return not random and all(_is_local(s, boundary) for s in slots_of(module))


@cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


def _is_local(slot: Slot, boundary: Boundary) -> bool:
    """Whether each rank has all of a parameter that its own experts use: its rows, or the whole parameter."""
    t = slot.tensor
    if slot.name not in own_parameters(slot.owner):
        return not isinstance(t, DTensor)  # a buffer
    return isinstance(t, DTensor) and t.device_mesh is boundary.mesh and t.sharding.sharded <= {boundary.axis}


def _on_rows(
    given: tuple[DTensor, Tensor, Tensor], boundary: Boundary, rows: Sequence[Factor]
) -> tuple[DTensor, DTensor, DTensor]:
    """The tokens, their experts and their weights, each rank with all of its rows: those that these factors give it."""
    mesh = boundary.mesh
    axes = axes_of(mesh)
    rows = rows or [Factor(given[0].shape[0])]

    def settled(t: Tensor) -> DTensor:
        whole = Layout.replicated(tuple(t.shape), axes)
        x = t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, whole.placements)
        # also where nothing moves: the gradient is reduced here, once
        return x.redistribute(placements=whole.with_dim(0, *rows).placements)

    x, index, weights = given
    return settled(x), settled(index), settled(weights)


def _sum_of_experts(
    original: Callable[..., Any], module: nn.Module, axis: int, x: DTensor, index: DTensor, weights: DTensor
) -> DTensor:
    """The results of each rank's experts for all tokens, as a pending sum along the axis."""
    blocks = [_with_own_gradient(t, {axis}) for t in (x, weights)]
    block = _on_own_experts(original, module, axis, x, index.to_local(), *blocks)
    pending = x.sharding.with_partial({axis: "sum"})
    return DTensor.from_local(block, x.device_mesh, pending.placements, shape=x.shape)


def _exchanged_sum(
    original: Callable[..., Any], module: nn.Module, axis: int, x: DTensor, index: DTensor, weights: DTensor
) -> DTensor:
    """The results for tokens that the axis splits: each is sent to the ranks of its experts, once, and a sum comes back."""
    mesh = x.device_mesh
    ranks = x.sharding.axes.sizes[axis]
    most = -(-module.num_experts // ranks)  # type: ignore[operator]
    own, chosen, shares = x.to_local(), index.to_local(), weights.to_local()

    def goes_to(coord: Any, chosen: Tensor) -> Tensor:
        owner = chosen // most
        return torch.stack([(owner == r).any(1) for r in range(ranks)])

    goes = on_mesh(mesh, goes_to, chosen)
    rows, send = goes.nonzero()[:, 1], goes.sum(1)
    one = torch.ones_like(send)
    receive = exchange_rows(send, one, one, mesh, axis)
    tokens, parts = (_Exchange.apply(t[rows], send, receive, mesh, axis) for t in (own, shares))  # type: ignore[no-untyped-call]
    experts = exchange_rows(chosen[rows], send, receive, mesh, axis)
    sums = _on_own_experts(original, module, axis, x, experts, tokens, parts)
    back = _Exchange.apply(sums, receive, send, mesh, axis)  # type: ignore[no-untyped-call]
    total = torch.zeros_like(own).index_add(0, rows, back)
    return DTensor.from_local(total, mesh, x.placements, shape=x.shape)


class _Exchange(torch.autograd.Function):
    """`apply(rows, numbers to send, numbers to receive, mesh, axis)`; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Tensor, receive: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        ctx.back = receive, send, mesh, axis
        return exchange_rows(x, send, receive, mesh, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None, None  # type: ignore[no-untyped-call]


def _on_own_experts(
    original: Callable[..., Any],
    module: nn.Module,
    axis: int,
    x: DTensor,
    index: Tensor,
    tokens: Tensor,
    weights: Tensor,
) -> Tensor:
    """The results of each rank's experts for the tokens that it has, which are tokens of `x`."""
    mesh, layout = x.device_mesh, x.sharding
    slots = [s for s in slots_of(module) if isinstance(s.tensor, DTensor)]
    blocks = [_with_own_gradient(s.tensor, {axis} | layout.sharded) for s in slots]  # type: ignore[arg-type]
    experts = Layout.replicated((module.num_experts,), layout.axes)  # type: ignore[arg-type]
    split = experts.with_dim(0, Factor(module.num_experts, (axis,)))  # type: ignore[arg-type]

    def on_rank(coord: Any, index: Tensor, x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        own = block_of(torch.arange(split.shape[0]), split, coord)
        with _own_experts(module, slots, parameters, len(own)):
            return _weighted(original, module, own, index, x, weights, parameters)

    return on_mesh(mesh, on_rank, index, tokens, weights, *blocks)  # type: ignore[no-any-return]


def _with_own_gradient(t: DTensor, axes: set[int] | frozenset[int]) -> Tensor:
    """The block of a tensor that ranks along these axes use differently: its gradient is a pending sum, unless it is split."""
    placements = [
        Partial() if a in axes and a not in t.sharding.sharded else p for a, p in enumerate(t.placements)
    ]
    return t.to_local(grad_placements=placements)


@contextmanager
def _own_experts(
    module: nn.Module, slots: list[Slot], parameters: tuple[Tensor, ...], count: int
) -> Iterator[None]:
    """Inside the block the module has the experts of one rank only."""
    total = module.num_experts
    module.num_experts = count  # type: ignore[assignment]
    try:
        for slot, block in zip(slots, parameters, strict=True):
            set_parameter(slot.owner, slot.name, block)
        yield
    finally:
        module.num_experts = total
        for slot in slots:
            set_parameter(slot.owner, slot.name, slot.tensor)


def _weighted(
    original: Callable[..., Any],
    module: nn.Module,
    own: Tensor,
    index: Tensor,
    x: Tensor,
    weights: Tensor,
    parameters: tuple[Tensor, ...],
) -> Tensor:
    """The weighted results of one rank's experts for each token; zero for a token that none of them takes."""
    out = torch.zeros_like(x)
    # each rank's graph has all its inputs, so that all ranks reduce the same gradients
    for t in (x, weights, *parameters):
        if t.is_floating_point():
            out = out + t.reshape(-1)[:0].sum().to(out.dtype)
    if not len(own):
        return out
    first = int(own[0])
    token, slot = ((index >= first) & (index < first + len(own))).nonzero(as_tuple=True)
    if not len(token):
        return out
    routed = (index[token, slot] - first).unsqueeze(1)
    result = original(module, x[token], routed, weights[token, slot].unsqueeze(1))
    return out.index_add(0, token, result.to(out.dtype))
