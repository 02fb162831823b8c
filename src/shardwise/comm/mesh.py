"""What the library needs to know of a `DeviceMesh`: its axes, who is where, and who talks to whom."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from shardwise.layout import Axes, LayoutError

__all__ = [
    "Coord",
    "Group",
    "PerMesh",
    "axes_of",
    "coord_of",
    "current_mesh",
    "group_of",
    "groups_along",
    "has_current_mesh",
    "members_of",
    "peers_of",
]

Coord = tuple[int, ...]
_T = TypeVar("_T")


class PerMesh:
    """A store of values for each mesh object, gone with it; equal meshes do not share, their groups may differ."""

    def __init__(self, most: int | None = None) -> None:
        self._kept: dict[int, dict[Any, Any]] = {}
        self._most = most

    def get(self, mesh: DeviceMesh, key: object, make: Callable[[], _T]) -> _T:
        """The value kept for this mesh under `key`, made at first."""
        kept = self._kept.get(id(mesh))
        if kept is None:
            kept = self._kept[id(mesh)] = {}
            weakref.finalize(mesh, self._kept.pop, id(mesh), None).atexit = False
        try:
            return kept[key]  # type: ignore[no-any-return]
        except KeyError:
            if self._most is not None and len(kept) >= self._most:
                del kept[next(iter(kept))]  # the oldest
            value = kept[key] = make()
            return value


_facts = PerMesh()


def current_mesh(mesh: DeviceMesh | None, what: str) -> DeviceMesh:
    """The mesh given, or the one of the `with mesh:` around us."""
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"{what} got {type(mesh).__name__} for a mesh.\n"
                "  why: device_mesh is a DeviceMesh\n"
                "  fix: make one with init_device_mesh"
            )
        return mesh
    if not _mesh_resources.mesh_stack:
        raise LayoutError(
            f"{what} has no mesh: No device mesh is currently active!",
            why="device_mesh was not given and there is no `with mesh:` around the call",
            fix="pass device_mesh=init_device_mesh(…), or call it inside `with mesh:`",
        )
    return _mesh_resources.get_current_mesh()


def has_current_mesh() -> bool:
    """Whether there is a `with mesh:` around the call."""
    return bool(_mesh_resources.mesh_stack)


def axes_of(mesh: DeviceMesh) -> Axes:
    """The names and sizes of a mesh's axes."""
    return _facts.get(mesh, "axes", lambda: Axes(tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())))


def coord_of(mesh: DeviceMesh) -> Coord | None:
    """Where this process is on the mesh, or None if it is not part of it."""
    coord = mesh.get_coordinate()
    return None if coord is None else tuple(coord)


def siblings_of(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of the mesh in row-major order; for a sub-mesh, also those of all its siblings."""
    return _facts.get(
        mesh,
        "siblings",
        lambda: mesh._layout.remap_to_tensor(mesh._rank_map).reshape(-1, axes_of(mesh).count).tolist(),
    )


def members_of(mesh: DeviceMesh) -> dict[int, Coord]:
    """The coord of every rank of the world that is on the mesh; a sub-mesh stands for all its siblings."""

    def make() -> dict[int, Coord]:
        axes = axes_of(mesh)
        return dict(sorted((r, axes.coord(i)) for row in siblings_of(mesh) for i, r in enumerate(row)))

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
    """The ranks that talk to each other over some axes, each group in the order of its peers."""
    names = axes_of(mesh)
    coords = [names.coord(i) for i in range(names.count)]
    rows = dict.fromkeys(peers_of(c, axes, names.sizes) for c in coords)
    return [tuple(ranks[names.number(c)] for c in row) for ranks in siblings_of(mesh) for row in rows]


@dataclass(frozen=True)
class Group:
    """A process group over some axes: its name for functional collectives, and its ranks' coords in its order."""

    name: str
    peers: tuple[Coord, ...]
    ranks: tuple[int, ...]


def group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> Group:
    """The process group of this rank over some axes of the mesh."""

    def make() -> Group:
        layout = axes_of(mesh)
        me = coord_of(mesh)
        if me is None:
            raise RuntimeError("a rank that is not on the mesh has no group on it")
        table = mesh.mesh
        rank_at = {c: int(table[c]) for c in peers_of(me, axes, layout.sizes)}
        # In the order of the coords, which is the same in the groups of all copies of a value: sums depend on
        # the order of their parts, and copies must be the same to the bit. The mesh's own groups go by rank.
        in_order = tuple(rank_at.values())
        group = mesh.get_group(axes[0]) if len(axes) == 1 else None
        if group is None or tuple(dist.get_process_group_ranks(group)) != in_order:
            group = _flat_group(in_order)
        ranks = tuple(dist.get_process_group_ranks(group))
        coord_at = {r: c for c, r in rank_at.items()}
        return Group(group.group_name, tuple(coord_at[r] for r in ranks), ranks)

    return _facts.get(mesh, ("group", axes), make)


_flat: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _flat_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks in this order, made at first use by them alone: ranks off the mesh take no part."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group of this mesh is gone: was destroy_process_group called?")
    if ranks == tuple(range(dist.get_world_size())):
        return world
    kept = _flat.get(ranks)
    if kept is None or kept[0] is not world:
        kept = _flat[ranks] = (world, _new_group(ranks))
    return kept[1]


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that its members alone make, under a name that they agree on.

    torch's name for it depends on how many groups a process has, and ranks of different meshes have different
    numbers of them: each would wait for the others under a name of its own.
    """
    name, torchs = "shardwise_" + "_".join(map(str, ranks)), distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), use_local_synchronization=True, sort_ranks=False
        )
    finally:
        distributed_c10d._hash_ranks_to_str = torchs
    return group
