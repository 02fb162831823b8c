"""Tensors on different meshes in one op, where the meaning is unambiguous: on a sub-mesh, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import map_tensors
from shardwise.call.op_call import OpCall
from shardwise.call.operands import check_operands, plain_counts
from shardwise.comm import PerRank, axes_of, first_rank, lifted
from shardwise.layout import Layout, Spec
from shardwise.plan.settings import current_settings
from shardwise.tensor.consistency import checked_shape
from shardwise.tensor.construct import from_block, replicated_spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout
from shardwise.torch_internals.autograd import in_backward
from shardwise.torch_internals.mesh import root_mesh

__all__ = [
    "common_submesh",
    "largest_mesh",
    "mesh_beside_numbers",
    "run_beside_numbers",
    "run_on_largest_mesh",
    "run_on_submesh",
]


def common_submesh(call: OpCall) -> DeviceMesh | None:
    """The mesh that is a sub-mesh of all others in a call, if every tensor is replicated along the rest of its own.

    Such a tensor has the same value for each copy of the sub-mesh, so the op can run there. It must not be written to, because
    it would then no longer be replicated. It must not need a gradient either, which would have to be summed over the
    rest of the mesh: that depends on grad mode and is checked on every call.
    """
    tensors = [t for t in call.tensors if isinstance(t, DTensor)]
    if all(t.device_mesh is tensors[0].device_mesh for t in tensors):
        return None
    small = min((t.device_mesh for t in tensors), key=lambda mesh: mesh.ndim)
    written = {id(t) for t in call.written}
    for t in tensors:
        if t.device_mesh == small:
            continue
        if id(t) in written or not _is_submesh(small, t.device_mesh):
            return None
        names = t.device_mesh.mesh_dim_names or ()
        others = set(names) - set(small.mesh_dim_names or ())
        if any(not t.placements[names.index(name)].is_replicate() for name in others):
            return None
    return small if any(t.device_mesh != small for t in tensors) else None


def run_on_submesh(func: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op with every tensor on a sub-mesh; raise if one of them needs a gradient."""
    call = OpCall(func, args, kwargs)
    larger = [t for t in call.tensors if isinstance(t, DTensor) and t.device_mesh != mesh]
    if torch.is_grad_enabled() and any(t.requires_grad for t in larger):
        if (whole := largest_mesh(call)) is not None:
            return run_on_largest_mesh(func, whole, args, kwargs)
        check_operands(call)  # raises
    return func(
        *map_tensors(lambda t: _narrow(t, mesh), args), **map_tensors(lambda t: _narrow(t, mesh), kwargs)
    )


def _is_submesh(small: DeviceMesh, mesh: DeviceMesh) -> bool:
    names, every = small.mesh_dim_names or (), mesh.mesh_dim_names or ()
    inside = bool(names) and set(names) < set(every)
    return inside and root_mesh(small) is root_mesh(mesh) and mesh[tuple(names)] == small


def _narrow(t: Any, mesh: DeviceMesh) -> Any:
    """A tensor on a sub-mesh of its mesh; its blocks are the same."""
    if not isinstance(t, DTensor) or t.device_mesh == mesh:
        return t
    names: Sequence[str] = t.device_mesh.mesh_dim_names or ()
    placements = [t.sharding.placements[names.index(name)] for name in mesh.mesh_dim_names or ()]
    layout = Layout.of(tuple(t.shape), axes_of(mesh), placements)
    return from_block(t._local_tensor, Spec(mesh, layout, t.dtype, t._spec.shape, t._spec.stride))


def largest_mesh(call: OpCall) -> DeviceMesh | None:
    """The mesh of which the meshes of all other tensors of a call are sub-meshes, if those are not written to."""
    tensors = [t for t in call.tensors if isinstance(t, DTensor)]
    mesh = max((t.device_mesh for t in tensors), key=lambda mesh: mesh.ndim)
    written = {id(t) for t in call.written}
    others = [t for t in tensors if t.device_mesh != mesh]
    inside = all(id(t) not in written and _is_submesh(t.device_mesh, mesh) for t in others)
    return mesh if others and inside else None


def run_on_largest_mesh(func: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on a mesh where plain tensors count as replicated, and so do tensors on sub-meshes along the other axes.

    Those are the buffers of a tensor-parallel module whose data are split over a data axis as well. They are compared as plain
    tensors are. Raises where plain tensors do not count as replicated, or if such a tensor needs a gradient.
    """
    call = OpCall(func, args, kwargs)
    others = [t for t in call.tensors if isinstance(t, DTensor) and t.device_mesh != mesh]
    policy = current_settings().plain
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in others)
    if needs_gradient or not (plain_counts(func) or in_backward()):
        check_operands(call)  # raises

    def lift(t: Any) -> Any:
        if not isinstance(t, DTensor) or t.device_mesh == mesh:
            return t
        layout = lifted(t.sharding, t.device_mesh, mesh)
        if policy == "check" and not in_backward():
            checked_shape(t._local_tensor, mesh, layout.placements, t.shape)
        return from_block(t._local_tensor, Spec(mesh, layout, t.dtype, t._spec.shape, t._spec.stride))

    return func(*map_tensors(lift, args), **map_tensors(lift, kwargs))


def mesh_beside_numbers(call: OpCall) -> DeviceMesh | None:
    """The mesh of an op's tensors, if those on other meshes have one element: a number has no layout.

    Between meshes of numbers only, such as norms of gradients, the one with most axes. As on a sub-mesh, the numbers must
    not be written to, and must not need a gradient.
    """
    tensors = [t for t in call.tensors if isinstance(t, DTensor)]
    if all(t.device_mesh == tensors[0].device_mesh for t in tensors):
        return None
    mesh = max(tensors, key=lambda t: (t.numel() != 1, t.device_mesh.ndim)).device_mesh
    written = {id(t) for t in call.written}
    others = [t for t in tensors if t.device_mesh != mesh]
    return mesh if all(t.numel() == 1 and id(t) not in written for t in others) else None


def run_beside_numbers(func: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on a mesh, with the numbers from other meshes as plain tensors; raise if one of them needs a gradient."""
    call = OpCall(func, args, kwargs)
    numbers = [t for t in call.tensors if isinstance(t, DTensor) and t.device_mesh != mesh]
    if torch.is_grad_enabled() and any(t.requires_grad for t in numbers):
        check_operands(call)  # raises

    def number(t: Any) -> Any:
        if not isinstance(t, DTensor) or t.device_mesh == mesh:
            return t
        reduced = to_layout(func, t, Layout.replicated(tuple(t.shape), t.sharding.axes))
        block = reduced._local_tensor
        if isinstance(
            block, PerRank
        ):  # plain tensors of simulated ranks are compared; these are numbers of one mesh
            return from_block(block, replicated_spec(first_rank(block), mesh))
        return block

    return func(*map_tensors(number, args), **map_tensors(number, kwargs))
