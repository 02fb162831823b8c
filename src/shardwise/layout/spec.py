"""Spec: the layout, mesh, dtype and strides of a tensor, which is everything but its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from shardwise.layout.immutable import Immutable
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement, Shard, StridedShard
from shardwise.layout.sizes import are_symbolic, as_sizes
from shardwise.layout.unit_axes import UnitPlacements, shown_placements, spelled

__all__ = ["ShardOrderEntry", "Spec", "TensorMeta", "dtype_text", "restore_spec"]


class TensorMeta(NamedTuple):
    """Global shape, strides and dtype, as torch's `DTensorSpec.tensor_meta` has them."""

    shape: Any
    stride: tuple[int, ...] | None
    dtype: Any


class ShardOrderEntry(NamedTuple):
    """A dim of a tensor and the mesh axes that split it, outermost first, as torch's `DTensorSpec.shard_order` has them."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


class Spec(Immutable):
    """Mesh, layout, dtype and global strides (None for a sparse tensor); interned and hashed by identity.

    The mesh and the dtype are opaque here. Meshes are compared by identity, because an equal mesh may belong to
    process groups that no longer exist. `units` are placements that show in `placements` only (see `unit_axes.py`).
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "is_symbolic",
        "layout",
        "mesh",
        "pattern",  # kept by `spec_pattern.py`
        "placements",
        "shape",
        "stride",
        "tensor_meta",
        "units",
    )

    mesh: Any
    layout: Layout
    dtype: Any
    shape: Any
    stride: tuple[int, ...] | None
    is_symbolic: bool
    """Whether some size or stride is a symbol, in a program that a compiler traces (see `sizes.py`)."""
    units: UnitPlacements
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta

    _interned: ClassVar[WeakValueDictionary[Hashable, Spec]] = WeakValueDictionary()
    live_mesh: ClassVar[Callable[[Any], Any]] = staticmethod(lambda mesh: mesh)
    """The mesh of this process for one that was restored; set where meshes are known."""
    shape_type: ClassVar[Callable[[Any], Any]] = tuple
    """The type of `shape`; set where torch is known."""
    of_placements: ClassVar[Callable[..., Spec]]
    """The spec of a mesh, placements, a `TensorMeta` and perhaps a `shard_order`; set where meshes are known."""
    draft: ClassVar[Callable[[Spec], Any]]
    """A copy that can be changed, a `SpecDraft`."""
    ORDER_FLAG: ClassVar[str] = "use_strided_shard_as_shard_order"
    """torch's choice between two ways of writing the order of axes. Layouts have one, so assigning it changes nothing."""

    def __new__(
        cls,
        mesh: Any,
        layout: Layout | None = None,
        dtype: Any = None,
        shape: Any = None,
        stride: tuple[int, ...] | None = None,
        units: UnitPlacements = (),
        *,
        placements: Any = None,
        tensor_meta: TensorMeta | None = None,
    ) -> Spec:
        if layout is None:  # torch's arguments, which `dataclasses.replace` passes
            return cls.of_placements(mesh, placements, tensor_meta)
        if units:
            units = spelled(layout, units)
        # `shape` equals layout.shape, in the type that users of torch expect: torch.Size
        try:
            key = (id(mesh), layout, dtype, stride, units)
            known = cls._interned.get(key)
        except TypeError:  # symbols as they come from calculations
            stride = as_sizes(stride or ())
            key = (id(mesh), layout, dtype, stride, units)
            known = cls._interned.get(key)
        if known is not None:
            return known
        symbolic = layout.is_symbolic
        if symbolic and shape is not None:
            shape = type(shape)(layout.shape)
        new = object.__new__(cls)
        shown = list(layout.placements if units else shown_placements(layout))
        for axis, placement in units:
            shown[axis] = placement
        new._set(mesh=mesh, layout=layout, dtype=dtype, shape=shape, stride=stride, units=units)
        new._set(placements=tuple(shown), tensor_meta=TensorMeta(shape, stride, dtype))
        new._set(is_symbolic=symbolic or are_symbolic(stride or ()))
        return cls._interned.setdefault(key, new)

    @property
    def device_mesh(self) -> Any:
        """The mesh, under torch's name."""
        return self.mesh

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return self.layout.ndim

    @property
    def dim_map(self) -> list[int]:
        """For each dim of the tensor the mesh axis that splits it, or -1, under torch's name; an axis per dim at most."""
        out = [-1] * self.ndim
        for axis, p in enumerate(self.placements):
            if isinstance(p, Shard | StridedShard):
                if out[p.dim] != -1:
                    raise ValueError(
                        f"dim_map of {self}: axes {out[p.dim]} and {axis} both split dim {p.dim}.\n"
                        "  why: It names one axis for each dim.\n"
                        "  fix: spec.layout.dims"
                    )
                out[p.dim] = axis
        return out

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim of the tensor the number of its blocks."""
        sizes = self.layout.axes.sizes
        return [
            math.prod(
                n
                for n, p in zip(sizes, self.placements, strict=True)
                if isinstance(p, Shard | StridedShard) and p.dim == d
            )
            for d in range(self.ndim)
        ]

    @property
    def shard_order(self) -> tuple[ShardOrderEntry, ...]:
        """For each dim that is split the mesh axes that split it, outermost first."""
        out = []
        for d in range(self.ndim):
            on = [a for f in self.layout.dims[d] for a in f.axes]
            shown = [
                a
                for a, p in enumerate(self.placements)
                if isinstance(p, Shard | StridedShard) and p.dim == d and a not in on
            ]
            if on or shown:
                out.append(ShardOrderEntry(d, (*on, *shown)))
        return tuple(out)

    @property
    def num_shards(self) -> int:
        """The number of different blocks."""
        return math.prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        """The mesh axes with a pending reduction."""
        return [axis for axis, p in enumerate(self.placements) if p.is_partial()]

    def is_replicated(self) -> bool:
        """Whether every rank has the full tensor."""
        return all(p.is_replicate() for p in self.placements)

    def is_sharded(self) -> bool:
        """Whether an axis splits the tensor."""
        return any(isinstance(p, Shard | StridedShard) for p in self.placements)

    def with_layout(self, layout: Layout, stride: tuple[int, ...] | None = None) -> Spec:
        """Replace the layout, and the strides if given."""
        after = self.stride if stride is None else stride
        return Spec(self.mesh, layout, self.dtype, self.shape, after, self.units)

    def with_dtype(self, dtype: Any) -> Spec:
        """Replace the dtype."""
        return Spec(self.mesh, self.layout, dtype, self.shape, self.stride, self.units)

    def with_units(self, units: UnitPlacements) -> Spec:
        """Replace the placements on axes of size 1."""
        if units == self.units:
            return self
        return Spec(self.mesh, self.layout, self.dtype, self.shape, self.stride, units)

    def __setattr__(self, name: str, value: object) -> None:
        if name == Spec.ORDER_FLAG:
            return
        if name in ("placements", "shard_order", "tensor_meta", "mesh"):
            raise AttributeError(
                f"cannot set {name}: the spec {self} is shared by all tensors that have it.\n"
                "  why: Specs are values: which layout a tensor has does not change behind its back.\n"
                f"  fix: spec = copy.copy(x._spec); spec.{name} = ...; y = DTensor(x.to_local(), spec)"
            )
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        """Do nothing: torch's specs are completed here after an assignment."""

    def __eq__(self, other: object) -> bool:
        return self is other or (getattr(type(other), "is_spec_draft", False) and other == self)

    __hash__ = Immutable.__hash__

    def __copy__(self) -> Any:
        return Spec.draft(self)

    def __deepcopy__(self, memo: object) -> Any:
        return self if memo else Spec.draft(self)  # inside a copy of something else it is the same spec

    def __reduce__(self) -> tuple[object, ...]:
        return restore_spec, (self.mesh, self.layout, self.dtype, self.shape, self.stride, self.units)

    def __str__(self) -> str:
        return self.layout.text(dtype_text(self.dtype))

    def __repr__(self) -> str:
        return f"Spec({self} on {self.layout.axes})"


def restore_spec(
    mesh: Any, layout: Layout, dtype: Any, shape: Any, stride: tuple[int, ...] | None, units: UnitPlacements
) -> Spec:
    """The spec that was pickled as these values."""
    return Spec(Spec.live_mesh(mesh), layout, dtype, shape, stride, units)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_text(dtype: object) -> str:
    """The short name of a dtype.

    >>> dtype_text("torch.float32"), dtype_text("torch.bfloat16"), dtype_text("torch.float8_e4m3fn")
    ('f32', 'bf16', 'f8_e4m3fn')
    """
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789_emfnuz") if "_" in name else name.rstrip("0123456789")
    return _SHORT.get(word, word) + name[len(word) :]
