"""Spec: a layout on a mesh with dtype and strides, which is all a tensor is but its data."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement

__all__ = ["Spec", "TensorMeta"]


class TensorMeta(NamedTuple):
    """Global shape, strides and dtype, under the name client code reads them by."""

    shape: Any
    stride: tuple[int, ...] | None
    dtype: Any


class Spec:
    """Mesh, layout, dtype and global strides of a tensor; interned and hashed by identity. A sparse one has no strides.

    The mesh and the dtype are opaque here. Meshes are told apart by identity: one that equals another may
    stand on process groups that are gone.
    """

    __slots__ = ("__weakref__", "dtype", "layout", "mesh", "placements", "shape", "stride", "tensor_meta")

    mesh: Any
    layout: Layout
    dtype: Any
    shape: Any
    stride: tuple[int, ...] | None
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta

    _known: ClassVar[WeakValueDictionary[Hashable, Spec]] = WeakValueDictionary()

    def __new__(
        cls, mesh: Any, layout: Layout, dtype: Any, shape: Any, stride: tuple[int, ...] | None
    ) -> Spec:
        # `shape` equals layout.shape; it comes in the tensor library's own type, which client code expects
        key = (id(mesh), layout, dtype, stride)
        known = cls._known.get(key)
        if known is not None:
            return known
        new = object.__new__(cls)
        set_ = object.__setattr__
        set_(new, "mesh", mesh)
        set_(new, "layout", layout)
        set_(new, "dtype", dtype)
        set_(new, "shape", shape)
        set_(new, "stride", stride)
        set_(new, "placements", layout.placements)
        set_(new, "tensor_meta", TensorMeta(shape, stride, dtype))
        return cls._known.setdefault(key, new)

    @property
    def device_mesh(self) -> Any:
        return self.mesh

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    def with_layout(self, layout: Layout, stride: tuple[int, ...] | None = None) -> Spec:
        """The same tensor in another layout."""
        return Spec(self.mesh, layout, self.dtype, self.shape, self.stride if stride is None else stride)

    def with_dtype(self, dtype: Any) -> Spec:
        """The same layout with another dtype."""
        return Spec(self.mesh, self.layout, dtype, self.shape, self.stride)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Spec is a value: it has no {name} to set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Spec is a value: it has no {name} to delete")

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: object) -> Spec:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Spec, (self.mesh, self.layout, self.dtype, self.shape, self.stride)

    def __str__(self) -> str:
        return self.layout.text(dtype_text(self.dtype))

    def __repr__(self) -> str:
        return f"Spec({self} on {self.layout.axes})"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_text(dtype: object) -> str:
    """The short name of a dtype.

    >>> dtype_text("torch.float32"), dtype_text("torch.bfloat16"), dtype_text("torch.float8_e4m3fn")
    ('f32', 'bf16', 'f8_e4m3fn')
    """
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789_emfnuz") if "_" in name else name.rstrip("0123456789")
    return _SHORT.get(word, word) + name[len(word) :]
