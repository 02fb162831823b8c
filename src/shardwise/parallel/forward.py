"""The forward pass of a parallelized module: plain tensors count as replicated, and plain inputs give plain outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, axes_of
from shardwise.parallel.agreement import check_plain_parameters
from shardwise.parallel.boundary import Boundary, share_inputs, stop_sharing_inputs
from shardwise.parallel.experts import run_experts
from shardwise.parallel.gradients import watch_gradients
from shardwise.parallel.plain import count_plain_as_replicated, module_input, to_plain
from shardwise.parallel.tree import map_tensors, tensors_in
from shardwise.plan.settings import pop_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.graph_calls import (
    ScopedState,
    call_in_graph,
    call_while_tracing,
    guard_state,
)
from shardwise.torch_internals.mesh import root_mesh

__all__ = ["is_parallelized", "wrap_method"]

_BOUNDARY = "_shardwise_boundary"


def is_parallelized(module: nn.Module) -> bool:
    """Whether a module was parallelized by a plan of strings, as a root or inside one."""
    return _BOUNDARY in vars(module)


def wrap_method(
    module: nn.Module,
    name: str,
    boundary: Boundary | None = None,
    *,
    mesh: DeviceMesh | None = None,
    plain: bool = True,
) -> None:
    """Replace a method of a module by one that takes plain tensors inside it as replicated.

    Args:
        module: the module, of which copies keep the method.
        name: the method: `forward`, or another that calls it.
        boundary: what happens to its inputs and outputs; only scope if None.
        mesh: where plain parameters of the module must be equal, if there is no boundary, which has a mesh.
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
    mesh = mesh if boundary is None else boundary.mesh
    vars(module)[name] = MethodType(_wrapped(original, boundary, mesh, plain), module)


def _wrapped(
    original: Callable[..., Any], boundary: Boundary | None, mesh: DeviceMesh | None, plain: bool
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_inside():
            return _from_outside(method, self, mesh, plain, args, kwargs)
        if boundary is None:
            return original(self, *args, **kwargs)
        if boundary.experts:
            return run_experts(original, self, boundary, args, kwargs)
        args, kwargs = boundary.enter(args, kwargs)
        return boundary.leave(original(self, *args, **kwargs))

    return method


def _from_outside(
    method: Callable[..., Any],
    module: nn.Module,
    mesh: DeviceMesh | None,
    plain: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of a parallelized module from code that is not in one.

    A checkpointed module that runs again in the backward pass comes here, too: if it is given plain tensors its outputs are
    plain, as they were in the forward pass.
    """
    with _scope():
        given = list(tensors_in((args, kwargs)))
        if mesh is not None:
            check_plain_parameters(module, mesh)
            if torch.is_grad_enabled():
                watch_gradients(module)
            data_mesh = _data_mesh(mesh, given)
            args, kwargs = map_tensors(lambda t: module_input(t, data_mesh), (args, kwargs))
        result = method(module, *args, **kwargs)
        if not plain or any(isinstance(t, DTensor) for t in given):
            return result
        per_rank = any(isinstance(t, PerRank) for t in given)
        return map_tensors(lambda t: to_plain(t, per_rank=per_rank), result)


def _data_mesh(mesh: DeviceMesh, given: Sequence[Tensor]) -> DeviceMesh:
    """The mesh of the arguments that are DTensors, if it has more axes than that of the parameters."""
    meshes = {t.device_mesh for t in given if isinstance(t, DTensor)}
    names = set(axes_of(mesh).names)
    larger = [m for m in meshes if root_mesh(m) is root_mesh(mesh) and names < set(axes_of(m).names)]
    return max([mesh, *larger], key=lambda m: m.ndim)


@call_while_tracing
def _is_inside() -> bool:
    return _inside.get() is not None


class _Outside(NamedTuple):
    """What a scope restores, and the scope around it."""

    fused: bool
    outer: _Outside | None


_inside: ContextVar[_Outside | None] = ContextVar("shardwise_inside_parallelized_module", default=None)


@contextmanager
def _scope() -> Iterator[None]:
    """Inside the block plain tensors count as replicated; a simulation and `policy(plain="check")` compare them.

    torch's fused inference kernels of whole attention and encoder layers are off: they would need all weights on each rank.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


@partial(call_in_graph, changes_state=True)
def _enter() -> None:
    _inside.set(_Outside(mha.get_fastpath_enabled(), _inside.get()))
    mha.set_fastpath_enabled(False)
    count_plain_as_replicated()
    share_inputs()


@partial(call_in_graph, changes_state=True)
def _leave() -> None:
    before = _inside.get()
    if before is not None:
        stop_sharing_inputs()
        pop_settings()
        mha.set_fastpath_enabled(before.fused)
        _inside.set(before.outer)


def _save() -> Callable[[], None]:
    before, fused = _inside.get(), mha.get_fastpath_enabled()

    def restore() -> None:
        _inside.set(before)
        mha.set_fastpath_enabled(fused)

    return restore


guard_state(ScopedState(_is_inside, _save))
