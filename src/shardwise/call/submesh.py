"""Tensors on a mesh and on a part of it in one op, where there is no doubt what is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.fallback import written_by
from shardwise.call.resolve import tensors_in
from shardwise.comm import axes_of
from shardwise.layout import Layout, Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import made

__all__ = ["common_part", "on_part"]


def common_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceMesh | None:
    """The mesh that is a part of all others that the tensors lie on, if each is the same along the rest of its own.

    Such a tensor has one value for each place of the part, so the op runs there, once for each. It may not be written
    to, for then it would no longer be the same along the rest, nor want a gradient, which would have to be added up.
    """
    found = [t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, DTensor)]
    if all(t.device_mesh is found[0].device_mesh for t in found):
        return None
    part = min((t.device_mesh for t in found), key=lambda mesh: mesh.ndim)
    written = {id(t) for t in written_by(func, args, kwargs)}
    for t in found:
        if t.device_mesh == part:
            continue
        wants_grad = torch.is_grad_enabled() and t.requires_grad
        if id(t) in written or wants_grad or not _is_part(part, t.device_mesh):
            return None
        rest = set(t.device_mesh.mesh_dim_names or ()) - set(part.mesh_dim_names or ())
        names = t.device_mesh.mesh_dim_names or ()
        if any(not t.placements[names.index(name)].is_replicate() for name in rest):
            return None
    return part if any(t.device_mesh != part for t in found) else None


def _is_part(part: DeviceMesh, mesh: DeviceMesh) -> bool:
    names, every = part.mesh_dim_names or (), mesh.mesh_dim_names or ()
    inside = bool(names) and set(names) < set(every)
    return inside and part._get_root_mesh() is mesh._get_root_mesh() and mesh[tuple(names)] == part


def on_part(value: Any, part: DeviceMesh) -> Any:
    """Arguments with each tensor as it lies on a part of its mesh; the blocks are the same."""
    if isinstance(value, DTensor):
        return value if value.device_mesh == part else _narrowed(value, part)
    if isinstance(value, list | tuple):
        return type(value)(on_part(v, part) for v in value)
    if isinstance(value, dict):
        return {k: on_part(v, part) for k, v in value.items()}
    return value


def _narrowed(t: DTensor, part: DeviceMesh) -> DTensor:
    names: Sequence[str] = t.device_mesh.mesh_dim_names or ()
    placements = [t.placements[names.index(name)] for name in part.mesh_dim_names or ()]
    layout = Layout.of(tuple(t.shape), axes_of(part), placements)
    return made(t._local_tensor, Spec(part, layout, t.dtype, t._spec.shape, t._spec.stride))
