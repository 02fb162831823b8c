"""SpecPattern: what a spec says beside sizes and strides, which a compiled program may have as symbols."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from shardwise.layout.axes import Axes
from shardwise.layout.factor import Dim, Factor
from shardwise.layout.immutable import Immutable
from shardwise.layout.layout import Layout
from shardwise.layout.spec import Spec, dtype_text
from shardwise.layout.text import layout_text
from shardwise.layout.unit_axes import UnitPlacements

__all__ = ["SpecPattern", "open_dim", "open_dims", "pattern_of", "restore_pattern"]

_MAX_SPECS = 256  # kept for each pattern

DimPattern = tuple[tuple[int, ...], tuple[Factor, ...], tuple[Factor, ...]]
"""The axes that split the factor of a dim whose size is open, the factors inside of it, and those around it."""


class SpecPattern(Immutable):
    """A mesh, a dtype and how axes split the dims of a tensor of any sizes; interned and hashed by identity.

    The size of a dim is open; of a dim of several factors, that of one of them, which is the outermost one if they are numbers.

    >>> from shardwise.layout import parse_layout
    >>> axes = Axes((2,), ("tp",))
    >>> spec = Spec("mesh", parse_layout("[8:tp, 24]", axes)[0], "torch.float32", (8, 24), (24, 1))
    >>> pattern = pattern_of(spec)
    >>> pattern
    f32[?:tp, ?]
    >>> print(pattern.at((10, 6), (6, 1)), pattern.at((8, 24), (24, 1)) is spec)
    f32[10:tp, 6] True
    """

    __slots__ = ("__weakref__", "_specs", "axes", "dims", "dtype", "is_dense", "mesh", "partial", "units")

    mesh: Any
    axes: Axes
    dims: tuple[DimPattern, ...]
    partial: tuple[tuple[int, str], ...]
    dtype: Any
    units: UnitPlacements
    is_dense: bool
    _specs: dict[Hashable, Spec]

    _interned: ClassVar[WeakValueDictionary[Hashable, SpecPattern]] = WeakValueDictionary()

    def __new__(
        cls,
        mesh: Any,
        axes: Axes,
        dims: tuple[DimPattern, ...],
        partial: tuple[tuple[int, str], ...],
        dtype: Any,
        units: UnitPlacements,
        is_dense: bool,
    ) -> SpecPattern:
        key = (id(mesh), axes, dims, partial, dtype, units, is_dense)
        known = cls._interned.get(key)
        if known is not None:
            return known
        new = object.__new__(cls)
        new._set(mesh=mesh, axes=axes, dims=dims, partial=partial, dtype=dtype, units=units)
        new._set(is_dense=is_dense, _specs={})
        return cls._interned.setdefault(key, new)

    def at(self, size: Sequence[int], stride: Sequence[int]) -> Spec:
        """The spec of a tensor with these sizes and strides."""
        try:
            return self._specs[size, stride]
        except KeyError:
            spec = self._spec(size, stride)
            if spec.is_symbolic:
                return spec
            if len(self._specs) >= _MAX_SPECS:
                self._specs.pop(next(iter(self._specs)), None)
            return self._specs.setdefault((size, stride), spec)
        except TypeError:  # lists, or symbols
            return self._spec(size, stride)

    def _spec(self, size: Sequence[int], stride: Sequence[int]) -> Spec:
        layout, steps = self.layout(size), tuple(stride) if self.is_dense else None
        return Spec(self.mesh, layout, self.dtype, Spec.shape_type(size), steps, self.units)

    def layout(self, size: Sequence[int]) -> Layout:
        """The layout of a tensor of these sizes."""
        dims = [open_dim(n, *pattern) for n, pattern in zip(size, self.dims, strict=True)]
        return Layout(self.axes, dims, dict(self.partial))

    def __reduce__(self) -> tuple[object, ...]:
        mesh, axes, dims, partial = self.mesh, self.axes, self.dims, self.partial
        return restore_pattern, (mesh, axes, dims, partial, self.dtype, self.units, self.is_dense)

    def __repr__(self) -> str:
        dims: list[Any] = [(*outer, Factor("?", axes), *inner) for axes, inner, outer in self.dims]  # type: ignore[arg-type]
        return layout_text(self.axes, dims, self.partial, dtype_text(self.dtype))


def open_dim(size: int, axes: tuple[int, ...], inner: Sequence[Factor], outer: Sequence[Factor] = ()) -> Dim:
    """The factors of a dim of some size, given the axes that split the open one, and the others.

    >>> open_dim(24, (0,), [Factor(4)], [Factor(2)])
    (Factor(size=2, axes=()), Factor(size=3, axes=(0,)), Factor(size=4, axes=()))
    """
    known = math.prod(f.size for f in (*outer, *inner))
    return (*outer, Factor(size // known, axes), *inner)


def open_dims(layout: Layout) -> tuple[DimPattern, ...]:
    """How axes split the dims of a layout, whatever their sizes are."""
    out = []
    for dim in layout.dims:
        factors = dim or (Factor(1),)
        i = next((i for i, f in enumerate(factors) if type(f.size) is not int), 0)
        outer, inner = (
            tuple(Factor(int(f.size), f.axes) for f in some) for some in (factors[:i], factors[i + 1 :])
        )
        out.append((factors[i].axes, inner, outer))
    return tuple(out)


def pattern_of(spec: Spec) -> SpecPattern:
    """The pattern of a spec. Of several symbolic sizes in a dim all but one become numbers, on which the compiled program then depends."""
    known: SpecPattern | None = getattr(spec, "pattern", None)
    if known is not None:
        return known
    layout, is_dense = spec.layout, spec.stride is not None
    dims = open_dims(layout)
    new = SpecPattern(spec.mesh, layout.axes, dims, layout.partial, spec.dtype, spec.units, is_dense)
    spec._set(pattern=new)
    return new


def restore_pattern(
    mesh: Any,
    axes: Axes,
    dims: tuple[DimPattern, ...],
    partial: tuple[tuple[int, str], ...],
    dtype: Any,
    units: UnitPlacements,
    is_dense: bool,
) -> SpecPattern:
    """The pattern that was pickled as these values."""
    return SpecPattern(Spec.live_mesh(mesh), axes, dims, partial, dtype, units, is_dense)
