"""Facts about a `DeviceMesh`: its axes, the coord of each rank, and the process groups over its axes."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.faults import watch_world
from shardwise.layout import Axes, Factor, Layout, LayoutError
from shardwise.torch_internals.mesh import axis_group_names, innermost_mesh, sibling_ranks
from shardwise.torch_internals.process_groups import create_group
from shardwise.torch_internals.rank_queries import process_coordinate, process_rank

__all__ = [
    "Coord",
    "Group",
    "PerMesh",
    "axes_of",
    "coord_of",
    "current_mesh",
    "forget_groups",
    "group_of",
    "groups_along",
    "has_current_mesh",
    "lifted",
    "members_of",
    "peers_of",
    "ranks_of",
    "siblings_of",
    "viewpoints",
]

Coord = tuple[int, ...]
_T = TypeVar("_T")


class PerMesh:
    """A cache of values for each mesh object, which lives as long as the mesh.

    Equal meshes do not share values, since their process groups may differ.

    Args:
        most: the number of values to keep for one mesh; the oldest is dropped first.
    """

    def __init__(self, most: int | None = None) -> None:
        self._kept: dict[int, dict[Any, Any]] = {}
        self._most = most

    def find(self, mesh: DeviceMesh, key: object) -> Any:
        """The value of this mesh under `key`, or None."""
        kept = self._kept.get(id(mesh))
        return None if kept is None else kept.get(key)

    def get(self, mesh: DeviceMesh, key: object, make: Callable[[], _T]) -> _T:
        """The value of this mesh under `key`, from `make()` the first time. It must not refer to the mesh."""
        kept = self._kept.get(id(mesh))
        if kept is None:
            kept = self._kept[id(mesh)] = {}
            weakref.finalize(mesh, self._kept.pop, id(mesh), None).atexit = False
        try:
            return kept[key]  # type: ignore[no-any-return]
        except KeyError:
            if self._most is not None and len(kept) >= self._most:
                del kept[next(iter(kept))]
            value = kept[key] = make()
            return value

    def clear(self) -> None:
        """Drop all values."""
        for kept in list(
            self._kept.values()
        ):  # a value may be the last to hold a mesh, whose entry goes with it
            kept.clear()


_facts = PerMesh()


def forget_groups() -> None:
    """Drop the facts about all meshes, when their process groups are destroyed."""
    _facts.clear()


def current_mesh(mesh: DeviceMesh | None, what: str) -> DeviceMesh:
    """The mesh given to the function `what`, or the one of the innermost `with mesh:` block."""
    found = innermost_mesh() if mesh is None else mesh
    if found is None:
        raise LayoutError(
            f"{what} has no mesh: No device mesh is currently active!",
            why="device_mesh was not given and the call is not inside a `with mesh:` block.",
            fix="Pass device_mesh=init_device_mesh(…), or call it inside `with mesh:`.",
        )
    if not isinstance(found, DeviceMesh):
        raise TypeError(
            f"{what} got {type(mesh).__name__} for a mesh.\n"
            "  why: device_mesh is a DeviceMesh.\n"
            "  fix: Make one with init_device_mesh."
        )
    return found


def has_current_mesh() -> bool:
    """Whether the call is inside a `with mesh:` block."""
    return innermost_mesh() is not None


def axes_of(mesh: DeviceMesh) -> Axes:
    """The names and sizes of a mesh's axes."""
    return _facts.get(mesh, "axes", lambda: Axes(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())))


viewpoints: list[int] = []
"""The rank whose program is being captured, if it is not this process: see `comm.simulate.viewpoint`."""


def coord_of(mesh: DeviceMesh) -> Coord | None:
    """The coord of this process on the mesh, or None if it is not on the mesh."""
    if viewpoints:
        return members_of(mesh).get(viewpoints[-1])
    return process_coordinate(mesh)


def siblings_of(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of the mesh in row-major order; for a sub-mesh, also those of each of its siblings."""
    return _facts.get(mesh, "siblings", lambda: sibling_ranks(mesh))


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of the mesh in row-major order; of a sub-mesh, those of this process's own, in a simulation of the first.

    Unlike `mesh.mesh` it runs no tensor ops, so it can be called while torch is tracing.
    """
    siblings, me = siblings_of(mesh), process_rank()
    return next((ranks for ranks in siblings if me in ranks), siblings[0])


def members_of(mesh: DeviceMesh) -> dict[int, Coord]:
    """The coord of each rank of the mesh, by rank; for a sub-mesh, also of the ranks of its siblings."""

    def make() -> dict[int, Coord]:
        coords = list(itertools.product(*map(range, axes_of(mesh).sizes)))
        return dict(sorted(pair for ranks in siblings_of(mesh) for pair in zip(ranks, coords, strict=True)))

    return _facts.get(mesh, "members", make)


def peers_of(coord: Coord, axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Coord, ...]:
    """The coords that differ from this one only on `axes`, in row-major order.

    >>> peers_of((1, 0), (0,), (2, 2))
    ((0, 0), (1, 0))
    """
    out = [coord]
    for a in axes:
        out = [(*c[:a], i, *c[a + 1 :]) for c in out for i in range(sizes[a])]
    return tuple(out)


def groups_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ranks of each group over some axes, in the order of their coords."""
    on = axes_of(mesh)
    starts = [n for n in range(on.count) if all(on.coord(n)[a] == 0 for a in axes)]
    offsets = _offsets(on, axes)
    return [tuple(ranks[start + i] for i in offsets) for ranks in siblings_of(mesh) for start in starts]


def _offsets(on: Axes, axes: tuple[int, ...]) -> list[int]:
    """The distance in row-major order from the first coord of a group over `axes` to each of its coords."""
    offsets = [0]
    for a in axes:
        stride = math.prod(on.sizes[a + 1 :])
        offsets = [o + i * stride for o in offsets for i in range(on.sizes[a])]
    return offsets


@dataclass(frozen=True)
class Group:
    """A process group over some axes of a mesh.

    Its ranks are in row-major order of their coords. The order is the same for all replicas of a value, so that they
    reduce in the same order and have the same bits.
    """

    name: str
    ranks: tuple[int, ...]
    coord: Coord  # of this process
    axes: tuple[int, ...]
    sizes: tuple[int, ...]  # of all axes of the mesh

    @cached_property
    def peers(self) -> tuple[Coord, ...]:
        """The coords of the ranks."""
        return peers_of(self.coord, self.axes, self.sizes)


def group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> Group:
    """The process group of this rank over some axes of the mesh, created at first use."""

    def make() -> Group:
        me, on = coord_of(mesh), axes_of(mesh)
        if me is None:
            raise RuntimeError("a rank that is not on the mesh has no group on it")
        watch_world()
        here = on.number(me)
        mine = next(ranks for ranks in siblings_of(mesh) if ranks[here] == process_rank())
        start = on.number([0 if a in axes else i for a, i in enumerate(me)])
        ranks = tuple(mine[start + i] for i in _offsets(on, axes))
        # the mesh's own groups are in the order of the ranks, which need not be that of the coords
        group = mesh.get_group(axes[0]) if len(axes) == 1 and axis_group_names(mesh) else None
        if group is None or tuple(dist.get_process_group_ranks(group)) != ranks:
            group = _group_in_order(ranks)
        return Group(group.group_name, ranks, me, axes, on.sizes)

    return _facts.get(mesh, ("group", axes), make)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()  # by the group of the world in which they were created
_locks: dict[tuple[int, tuple[int, ...]], threading.Lock] = {}


def _group_in_order(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks in this order, created at first use by its members alone."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group of this mesh is gone: was destroy_process_group called?")
    if ranks == tuple(range(dist.get_world_size())):
        return world
    # a lock per group: creating one waits for its members, which may be creating another in another thread
    with _locks.setdefault((id(world), ranks), threading.Lock()):
        known = _groups.setdefault(world, {})
        if ranks not in known:
            known[ranks] = create_group("shardwise_" + "_".join(map(str, ranks)), ranks)
        return known[ranks]


def lifted(layout: Layout, mesh: DeviceMesh, to: DeviceMesh) -> Layout:
    """The same layout on a mesh with more axes, along which the tensor is replicated."""
    if mesh is to or mesh == to:
        return layout
    ours, theirs = axes_of(mesh), axes_of(to)
    index = [theirs.index(name) for name in ours.names]
    dims = [[Factor(f.size, tuple(index[a] for a in f.axes)) for f in dim] for dim in layout.dims]
    return Layout(theirs, dims, {index[a]: op for a, op in layout.partial})
