"""The forward pass of a parallelized module: plain tensors count as replicated, and plain inputs give plain outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, is_simulated
from shardwise.layout import Replicate
from shardwise.parallel.boundary import Boundary, sharing_inputs
from shardwise.parallel.tree import map_tensors, tensors_in
from shardwise.plan.settings import current_settings, override_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import in_backward

__all__ = ["boundary_of", "is_parallelized", "wrap_method"]

_BOUNDARY = "_shardwise_boundary"
_inside: ContextVar[bool] = ContextVar("shardwise_inside_parallelized_module", default=False)


def boundary_of(module: nn.Module) -> Boundary | None:
    """The boundary of a module that was parallelized by a plan of strings."""
    return vars(module).get(_BOUNDARY)


def is_parallelized(module: nn.Module) -> bool:
    """Whether a module was parallelized by a plan of strings, as a root or inside one."""
    return _BOUNDARY in vars(module)


def wrap_method(
    module: nn.Module, name: str, boundary: Boundary | None = None, *, plain: bool = True
) -> None:
    """Replace a method of a module by one that takes plain tensors inside it as replicated.

    Args:
        module: the module, of which copies keep the method.
        name: the method: `forward`, or another that calls it.
        boundary: what happens to its inputs and outputs; only scope if None.
        plain: if it is called from outside and without DTensors, return plain tensors.
    """
    own = vars(module).get(name)
    if own is None or (isinstance(own, MethodType) and own.__self__ is module):
        original = getattr(type(module), name) if own is None else own.__func__
    else:
        original = functools.wraps(own)(lambda self, *args, **kwargs: own(*args, **kwargs))
    if boundary is not None:
        vars(module)[_BOUNDARY] = boundary
    # bound, so that a deep copy of the module binds its copy
    vars(module)[name] = MethodType(_wrapped(original, boundary, plain), module)


def _wrapped(original: Callable[..., Any], boundary: Boundary | None, plain: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _inside.get():
            return _from_outside(method, self, boundary, plain, args, kwargs)
        if boundary is None:
            return original(self, *args, **kwargs)
        args, kwargs = boundary.enter(args, kwargs)
        return boundary.leave(original(self, *args, **kwargs))

    return method


def _from_outside(
    method: Callable[..., Any],
    module: nn.Module,
    boundary: Boundary | None,
    plain: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of a parallelized module from code that is not in one."""
    with _scope():
        if in_backward():  # a checkpointed part of the forward pass runs again
            return method(module, *args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        mesh = None if boundary is None else boundary.mesh
        if mesh is not None:
            _watch_plain_parameters(module)
            args, kwargs = map_tensors(lambda t: _differentiable_input(t, mesh), (args, kwargs))
        result = method(module, *args, **kwargs)
        if not plain or any(isinstance(t, DTensor) for t in given):
            return result
        per_rank = any(isinstance(t, PerRank) for t in given)
        return map_tensors(lambda t: _to_plain(t, per_rank), result)


@contextmanager
def _scope() -> Iterator[None]:
    """Inside the block plain tensors count as replicated; a simulation and `policy(plain="check")` compare them."""
    compare = is_simulated() or current_settings().plain == "check"
    token = _inside.set(True)
    try:
        with override_settings(plain="check" if compare else "replicate"), sharing_inputs():
            yield
    finally:
        _inside.reset(token)


def _differentiable_input(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain input whose gradient is wanted, replicated, so that its gradient is plain as well."""
    if isinstance(t, DTensor) or not (t.requires_grad and torch.is_grad_enabled()):
        return t
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim)


class _ToPlain(torch.autograd.Function):
    """In a simulation: a replicated DTensor as one plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh = x.device_mesh
        blocks: tuple[Tensor, ...] = x._local_tensor.ranks  # type: ignore[attr-defined]
        first, *others = blocks
        if any(not _same_values(first, other) for other in others):
            raise RuntimeError(
                f"A replicated output of shape {tuple(x.shape)} differs between the simulated ranks.\n"
                "  why: The module computed it from plain tensors or blocks that differ between ranks.\n"
                "  fix: Pass what differs between ranks as a DTensor."
            )
        return first.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return DTensor.from_local(grads[0], ctx.mesh, [Replicate()] * ctx.mesh.ndim)


def _same_values(a: Tensor, b: Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _to_plain(t: Tensor, per_rank: bool) -> Tensor:
    """An output as code outside of the module takes it: the full tensor on each rank."""
    if not isinstance(t, DTensor):
        return t
    if per_rank or not is_simulated():
        return t.full_tensor()
    full = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return _ToPlain.apply(full)  # type: ignore[no-untyped-call, no-any-return]


_WATCHED = "_shardwise_gradient_is_plain"


def _watch_plain_parameters(module: nn.Module) -> None:
    """Give plain parameters, which were added after the module was parallelized, plain gradients.

    They count as replicated, so autograd hands them DTensors.
    """
    for p in module.parameters():
        if not isinstance(p, DTensor) and p.requires_grad and not hasattr(p, _WATCHED):
            setattr(p, _WATCHED, True)
            p.register_hook(_plain_gradient)


def _plain_gradient(grad: Tensor) -> Tensor:
    return _to_plain(grad, per_rank=False)
