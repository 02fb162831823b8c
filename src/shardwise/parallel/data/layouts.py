"""The three layouts of a parameter: as it is stored, as it is computed with, and as its gradient is reduced to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import axes_of, lifted
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Factor, Layout, LayoutError
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.mesh import root_mesh

__all__ = ["DataAxes", "ParameterLayout", "common_mesh", "have_common_mesh", "mesh_slice", "parameter_layout"]


@dataclass(frozen=True)
class DataAxes:
    """The axes of a mesh along which the data differ: those that split parameters, and those that replicate them."""

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]

    @property
    def every(self) -> tuple[int, ...]:
        """All data axes, in the order of the mesh."""
        return tuple(sorted((*self.shard, *self.replicate)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all data axes; an axis without a name is named by its index."""
        return axes_of(self.mesh).names_of(self.every)


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter is stored and computed with.

    Attributes:
        mesh: the mesh of the stored parameter: the data axes and those that the parameter was on.
        data: the data axes on that mesh, without those that already split the parameter.
        stored: the layout between steps.
        computed: the layout in computations.
        inner: the mesh and layout that a program sees which has its own data on each rank: without the data axes. None
            if it sees a plain tensor.
        stored_plain: whether the stored parameter is a plain tensor, of which each rank has all.
        declares_data: whether the program has named the data axes: data differ along them also where a DTensor is replicated.
    """

    mesh: DeviceMesh
    data: tuple[int, ...]
    stored: Layout
    computed: Layout
    inner: tuple[DeviceMesh, Layout] | None
    stored_plain: bool = False
    declares_data: bool = False

    @property
    def data_ranks(self) -> int:
        """The number of ranks with data of their own."""
        sizes = self.stored.axes.sizes
        return math.prod(sizes[a] for a in self.data)

    def pending_gradient(self, computed: Layout, op: str) -> Layout:
        """The layout of a gradient that differs along the data axes, given its layout on the others."""
        return computed.with_partial(dict(computed.partial) | dict.fromkeys(self.data, op))


def parameter_layout(
    param: Tensor, on: DataAxes, dim: int | None, whole_mesh: bool, plain: bool = False
) -> ParameterLayout:
    """The layouts of a parameter whose dim `dim` the data axes split; None for a parameter that stays replicated.

    Args:
        whole_mesh: whether DTensors are on a mesh that has all axes, of which the data axes are not the program's.
        plain: whether a parameter that stays replicated is stored as a plain tensor.
    """
    if not isinstance(param, DTensor):
        mesh = _own_mesh(on)
        computed, data, inner = Layout.replicated(param.shape, axes_of(mesh)), _indices(mesh, on.names), None
    else:
        theirs = param.device_mesh
        mesh = common_mesh([_own_mesh(on), theirs])
        computed = lifted(param.sharding, theirs, mesh)
        used = computed.sharded | {a for a, _ in computed.partial}
        data = tuple(a for a in _indices(mesh, on.names) if a not in used)
        if 0 < len(data) < len(on.names) and not whole_mesh:
            _refuse_overlap(param, on)
        inner = _inner(param, on) if whole_mesh else (theirs, param.sharding)
    names = axes_of(on.mesh).names_of(on.shard)
    shard = tuple(a for a in _indices(mesh, names) if a in data) if dim is not None and computed.ndim else ()
    stored = computed
    if shard and dim is not None:
        first, *rest = computed.dims[dim] or (Factor(computed.shape[dim]),)
        # innermost: a gather over the data axes gives the block that the other axes have
        stored = computed.with_dim(dim, Factor(first.size, (*first.axes, *shard)), *rest)
    return ParameterLayout(mesh, data, stored, computed, inner, plain, whole_mesh)


def _refuse_overlap(param: DTensor, on: DataAxes) -> None:
    """Raise for data axes of which some split a parameter already, and others do not.

    If all do, the data are the same on all their ranks, as tensor parallelism has it: what it has replicated is split for storage.
    """
    both = ", ".join(n for n in axes_of(param.device_mesh).names if n in on.names)
    raise LayoutError(
        f"The data are on ({axes_of(on.mesh)}), whose axis {both} already splits a parameter: {param.sharding}.",
        why="Along a data axis each rank has its own data. A block of a parameter would meet those of one rank only.",
        fix='Split the data over another axis of the mesh, fully_shard(module, mesh=mesh["dp"]); or leave the parameter as it is, '
        "fully_shard(…, ignored_params={parameter}).",
    )


def _own_mesh(on: DataAxes) -> DeviceMesh:
    return on.mesh if len(on.every) == on.mesh.ndim else mesh_slice(on.mesh, on.names)


def _inner(param: DTensor, on: DataAxes) -> tuple[DeviceMesh, Layout] | None:
    """The mesh and layout of a parameter without the data axes."""
    mesh, names = param.device_mesh, axes_of(param.device_mesh).names
    used = param.sharding.sharded
    kept = tuple(n for a, n in enumerate(names) if n not in on.names or a in used)
    if not kept:
        return None
    if len(kept) == len(names):
        return mesh, param.sharding
    inner = mesh_slice(mesh, kept)
    placements = [param.sharding.placements[names.index(n)] for n in axes_of(inner).names]
    return inner, Layout.of(tuple(param.shape), axes_of(inner), placements)


def _indices(mesh: DeviceMesh, names: Sequence[str]) -> tuple[int, ...]:
    on = axes_of(mesh)
    return tuple(on.index(n) for n in names)


_slices: dict[tuple[int, tuple[str, ...]], DeviceMesh] = {}
at_simulation_end(_slices.clear)


def mesh_slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The slice of a mesh with these axes; the same object for equal arguments, so that tensors share their mesh."""
    root = root_mesh(mesh)
    order = axes_of(root).names
    names = tuple(sorted(names, key=order.index)) if set(names) <= set(order) else names
    if names == axes_of(mesh).names:
        return mesh
    if names == order:
        return root
    key = (id(root), names)
    if key not in _slices:
        _slices[key] = root[names] if set(names) <= set(order) else mesh[names]
    return _slices[key]


def common_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the axes of all these meshes, which are slices of one mesh."""
    first = meshes[0]
    if all(mesh is first or mesh == first for mesh in meshes):
        return first
    root = root_mesh(first)
    names = {n for mesh in meshes for n in axes_of(mesh).names}
    if (whole := _mesh_with(names, meshes)) is not None:
        return whole
    for mesh in meshes:
        if mesh.device_type != first.device_type:
            raise LayoutError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{mesh.device_type} for DTensor and {first.device_type} for FSDP.",
                why=f"A parameter is on the mesh ({axes_of(mesh)}), and the data are on ({axes_of(first)}).",
                fix=f'mesh = init_device_mesh("{first.device_type}", (2, 4), mesh_dim_names=("dp", "tp")); use mesh["dp"] and '
                'mesh["tp"].',
            )
        if not have_common_mesh([first, mesh]):
            raise LayoutError(
                f"A parameter is on the mesh ({axes_of(mesh)}), and the data are on ({axes_of(first)}).",
                why="Both must be slices of one mesh, which says how their axes lie to each other.",
                fix='mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp")); use mesh["dp"] and mesh["tp"].',
            )
    return mesh_slice(root, tuple(n for n in axes_of(root).names if n in names))


def _mesh_with(names: set[str], meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """The one of these meshes that the others are slices of, which may itself be made of axes that its root does not have."""
    if len({root_mesh(mesh) for mesh in meshes}) > 1:
        return None
    return next((mesh for mesh in meshes if names == set(axes_of(mesh).names)), None)


def have_common_mesh(meshes: Sequence[DeviceMesh]) -> bool:
    """Whether there is a mesh with the axes of all these meshes: they are equal, or slices of one mesh."""
    first = meshes[0]
    root = root_mesh(first)
    axes, names = set(axes_of(root).names), {n for mesh in meshes for n in axes_of(mesh).names}
    return (
        all(mesh is first or mesh == first for mesh in meshes)
        or all(root_mesh(mesh) == root and axes.issuperset(axes_of(mesh).names) for mesh in meshes)
        or _mesh_with(names, meshes) is not None
    )
