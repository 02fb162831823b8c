"""Which groups of ranks a process group of rank 0 stands for in a simulation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import groups_along
from shardwise.torch_internals.mesh import axis_group_names, watch_new_meshes
from shardwise.torch_internals.process_groups import resolve_group

__all__ = ["groups_like", "known_meshes"]

_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


@contextmanager
def known_meshes() -> Iterator[None]:
    """Know the meshes that are created inside: a group alone does not tell the groups of the other ranks."""
    with watch_new_meshes(_meshes.add):
        try:
            yield
        finally:
            _meshes.clear()


def groups_like(group: Any) -> list[tuple[int, ...]]:
    """The ranks of a group of rank 0, given by itself or by name, and, if an axis of a mesh has it, of all groups along the axis."""
    if group is None:
        return [tuple(range(dist.get_world_size()))]
    if isinstance(group, str):
        group = resolve_group(group)
    for mesh in _meshes:
        names = axis_group_names(mesh)
        if group.group_name in names and len(names) == mesh.ndim:
            return groups_along(mesh, (names.index(group.group_name),))
    return [tuple(dist.get_process_group_ranks(group))]
