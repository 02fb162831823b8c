"""What `DeviceMesh` does not document: its ranks and those of its siblings, its groups, the `with mesh:` stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

__all__ = [
    "axis_group_names",
    "innermost_mesh",
    "restored_mesh_stack",
    "root_mesh",
    "sibling_ranks",
    "split_axis",
    "watch_new_meshes",
]


def innermost_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block of this thread, or None outside of any."""
    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


@contextmanager
def restored_mesh_stack() -> Iterator[None]:
    """At the end, leave all `with mesh:` blocks that were entered inside and not left."""
    before = list(_mesh_resources.mesh_stack)
    try:
        yield
    finally:
        _mesh_resources.mesh_stack[:] = before


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or the mesh itself."""
    return mesh._get_root_mesh()


def sibling_ranks(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of each mesh with the same axes that the root mesh consists of, in row-major order.

    A mesh that is not a slice is its only sibling. Runs no tensor ops, so it can be called while torch is tracing.
    """
    layout, ranks = mesh._layout.collapse(), mesh._flatten_rank_map
    inside = layout.all_ranks_from_zero()
    starts = layout.complement(len(ranks)).all_ranks_from_zero()
    return [[ranks[start + i] for i in inside] for start in starts]


def split_axis(mesh: DeviceMesh, axis: int, sizes: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """The same ranks on a mesh that has two axes instead of one. It has no process groups; nothing is communicated."""
    flat, root = mesh._layout, mesh._get_root_mesh()
    parts = flat[axis].composition(type(flat).from_sizes_strides(sizes))
    every = list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
    every[axis : axis + 1] = names
    return DeviceMesh(
        mesh.device_type,
        _layout=flat.splice(axis, axis + 1, parts),
        _rank_map=root._rank_map,
        mesh_dim_names=tuple(every),
        _root_mesh=root,
        _init_backend=False,
    )


def axis_group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The name of this rank's process group along each axis; empty if the rank is not on the mesh."""
    return tuple(getattr(mesh, "_dim_group_names", ()))


@contextmanager
def watch_new_meshes(on_created: Callable[[DeviceMesh], None]) -> Iterator[None]:
    """Call a function with each mesh that is created inside, slices and flattened meshes included.

    Replaces `DeviceMesh.__init__`; if other code has replaced it, too, that is left in place at the end.
    """
    original = DeviceMesh.__init__
    active = True

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if active:
            on_created(self)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        active = False
        if DeviceMesh.__init__ is init:
            DeviceMesh.__init__ = original  # type: ignore[method-assign]
