"""Layout: how a mesh holds a tensor of a given shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self
from weakref import WeakValueDictionary

from shardwise.layout.axes import Axes
from shardwise.layout.errors import DimError, LayoutError, PlacementTypeError
from shardwise.layout.factor import Dim, Factor, canonical
from shardwise.layout.immutable import Immutable
from shardwise.layout.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.layout.sizes import are_symbolic, as_size, as_sizes
from shardwise.layout.strided import without_strided
from shardwise.layout.text import layout_text

__all__ = ["Layout"]

_Key = tuple[Axes, tuple[Dim, ...], tuple[tuple[int, str], ...]]


class Layout(Immutable):
    """The factors of each dim with the axes that split them, and the axes on which a reduction is pending.

    Layouts are interned: equal layouts are the same object.

    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> Layout.of((8, 6), axes, (Shard(0), Partial()))
    [8:dp, 6] P(tp,sum)
    >>> Layout.of((8,), axes, (Shard(0, order=1), Shard(0, order=0)))
    [8:tp,dp]
    """

    __slots__ = ("__weakref__", "_placements", "axes", "dims", "is_symbolic", "partial", "shape")

    axes: Axes
    dims: tuple[Dim, ...]
    partial: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    is_symbolic: bool
    """Whether some size is a symbol, in a program that a compiler traces (see `sizes.py`)."""
    _placements: tuple[Placement, ...] | None

    _interned: ClassVar[WeakValueDictionary[_Key, Layout]] = WeakValueDictionary()

    def __new__(
        cls, axes: Axes, dims: Iterable[Iterable[Factor]], partial: Mapping[int, str] | None = None
    ) -> Self:
        sizes = axes.sizes
        factors = tuple(canonical(dim, sizes) for dim in dims)
        pending = tuple(sorted((a, op) for a, op in (partial or {}).items() if sizes[a] > 1))
        try:
            key = axes, factors, pending
            known = cls._interned.get(key)
        except TypeError:  # symbols as they come from calculations
            factors = tuple(tuple(Factor(as_size(n), on) for n, on in dim) for dim in factors)
            key = axes, factors, pending
            known = cls._interned.get(key)
        if known is not None:
            return known  # type: ignore[return-value]
        _check_axes(axes, factors, pending)
        symbolic = are_symbolic(f.size for dim in factors for f in dim)
        shape = tuple(math.prod(f.size for f in dim) for dim in factors)
        new = object.__new__(cls)
        new._set(axes=axes, dims=factors, partial=pending, shape=as_sizes(shape) if symbolic else shape)
        new._set(is_symbolic=symbolic, _placements=None)
        # setdefault, so that two threads that construct the same layout get the same object
        return cls._interned.setdefault(key, new)  # type: ignore[return-value]

    @classmethod
    def of(cls, shape: Sequence[int], axes: Axes, placements: Sequence[Placement]) -> Layout:
        """The layout of a shape with one placement per axis."""
        placements = _normalize(tuple(shape), axes, placements)
        dims = [_dim_of(size, d, axes, placements) for d, size in enumerate(shape)]
        partial = {a: p.reduce_op for a, p in enumerate(placements) if isinstance(p, Partial)}
        return cls(axes, dims, partial)

    @classmethod
    def replicated(cls, shape: Sequence[int], axes: Axes) -> Layout:
        """The layout in which every rank holds the full tensor."""
        return cls(axes, [(Factor(size),) for size in shape])

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as one placement per axis."""
        if self._placements is None:
            out: list[Placement] = [Replicate()] * len(self.axes)
            for axis, op in self.partial:
                out[axis] = Partial(op)
            for d, dim in enumerate(self.dims):
                factors = tuple(f.size for f in dim) if len(dim) > 1 else ()
                for i, f in enumerate(dim):
                    in_mesh_order = tuple(sorted(f.axes)) == f.axes
                    for order, axis in enumerate(f.axes):
                        out[axis] = Shard(d, None if in_mesh_order else order, factors, i if factors else 0)
            self._set(_placements=tuple(out))
        return self._placements  # type: ignore[return-value]

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.dims)

    @property
    def sharded(self) -> frozenset[int]:
        """The axes that split a dim."""
        return frozenset(a for dim in self.dims for f in dim for a in f.axes)

    def with_dim(self, d: int, *factors: Factor) -> Layout:
        """Replace the factors of dim `d`."""
        return Layout(self.axes, [*self.dims[:d], factors, *self.dims[d + 1 :]], dict(self.partial))

    def with_dims(self, dims: Iterable[Iterable[Factor]]) -> Layout:
        """Replace all dims, keeping the pending reductions."""
        return Layout(self.axes, dims, dict(self.partial))

    def with_partial(self, partial: Mapping[int, str]) -> Layout:
        """Replace the pending reductions, keeping the dims."""
        return Layout(self.axes, self.dims, partial)

    def without(self, axes: Iterable[int]) -> Layout:
        """Replicate these axes, keeping the others."""
        drop = frozenset(axes)
        dims = [[Factor(f.size, tuple(a for a in f.axes if a not in drop)) for f in dim] for dim in self.dims]
        return Layout(self.axes, dims, {a: op for a, op in self.partial if a not in drop})

    def refreshed(self) -> Layout:
        """The layout by what is known of its symbols now: some may have become numbers, others equal."""
        if not self.is_symbolic:
            return self
        return self.with_dims([[Factor(as_size(f.size), f.axes) for f in dim] for dim in self.dims])

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.axes, self.dims, dict(self.partial))

    def __repr__(self) -> str:
        return self.text()

    def text(self, dtype: str = "") -> str:
        """The text form, after the short name of a dtype if one is given."""
        return layout_text(self.axes, self.dims, self.partial, dtype)


def _check_axes(axes: Axes, dims: tuple[Dim, ...], partial: tuple[tuple[int, str], ...]) -> None:
    used = [a for dim in dims for f in dim for a in f.axes] + [a for a, _ in partial]
    for a in used:
        if used.count(a) > 1:
            raise LayoutError(
                f"Axis {axes.names[a]} is used {used.count(a)} times.",
                why="An axis splits one factor of one dim, or is partial, or replicates.",
                fix="Use it once.",
            )
    ops = {op for _, op in partial}
    if unknown := ops - set(REDUCE_OPS):
        raise LayoutError(
            f"{sorted(unknown)} cannot be pending.",
            why="The reduction is unknown.",
            fix=f"Use one of {', '.join(REDUCE_OPS)}.",
        )
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"Mixed Partial reduce types are not supported: {', '.join(sorted(ops))} on one tensor.",
            why="These reductions do not commute, so the value would depend on their order.",
            fix="Use one reduction for all Partial axes (sum and avg may be mixed).",
        )


def _normalize(shape: tuple[int, ...], axes: Axes, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Check placements against a shape and a mesh, and make their dims non-negative."""
    if not isinstance(placements, Sequence):
        raise TypeError(
            f"placements must be a sequence, got {placements!r}.\n"
            f"  why: It has one placement for each axis of the mesh ({axes}).\n"
            f"  fix: placements=[{placements!r}]"
        )
    if len(placements) != len(axes):
        raise LayoutError(
            f"`placements` must have the same length as `device_mesh.ndim`: {len(placements)} for {len(axes)} axes.",
            why=f"Each axis of the mesh ({axes}) needs one placement, got ({', '.join(map(str, placements))}).",
            fix="Add Replicate() for the axes that should not split the tensor."
            if len(placements) < len(axes)
            else f"Pass {len(axes)} placements.",
        )
    out: list[Placement] = []
    is_strided = False
    for a, p in enumerate(placements):
        if not isinstance(p, Shard | Replicate | Partial | StridedShard):
            given: object = p
            raise PlacementTypeError(
                f"Axis {axes.names[a]} has {p!r} of {type(p).__module__} as its placement.",
                why="A placement is Shard(dim), Replicate() or Partial(op) of shardwise.",
                fix=f"Write {given.__name__}(…)."
                if isinstance(given, type)
                else "Import them from shardwise.",
            )
        if isinstance(p, Shard | StridedShard):
            if not -len(shape) <= p.dim < len(shape):
                raise DimError(
                    f"Shard dim {p.dim} is invalid for {len(shape)}D tensor: "
                    f"{type(p).__name__}({p.dim}) on axis {axes.names[a]} is out of range for shape {shape}.",
                    why=f"The tensor has {len(shape)} dims.",
                    fix=f"Use a dim in {-len(shape)}..{len(shape) - 1}." if shape else "Use Replicate().",
                )
            if p.dim < 0:
                p = replace(p, dim=p.dim + len(shape))
            is_strided = is_strided or isinstance(p, StridedShard)
        out.append(p)
    return without_strided(shape, axes, out) if is_strided else tuple(out)


def _dim_of(size: int, d: int, axes: Axes, placements: Sequence[Placement]) -> Dim:
    """The factors of one dim, from the placements that split it."""
    shards = [(a, p) for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == d]
    sizes = _factor_sizes(size, d, axes, shards)
    groups: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for a, p in shards:
        # a plain Shard beside one with factors splits the outermost factor, as torch writes FSDP over TP
        groups[p.factor if p.factors else 0].append((a if p.order is None else p.order, a))
    return tuple(
        Factor(s, tuple(a for _, a in sorted(group))) for s, group in zip(sizes, groups, strict=True)
    )


def _factor_sizes(size: int, d: int, axes: Axes, shards: Sequence[tuple[int, Shard]]) -> tuple[int, ...]:
    options = {as_sizes(p.factors) for _, p in shards if p.factors}
    if not options:
        return (size,)
    (sizes,) = options if len(options) == 1 else ((),)
    if sizes and math.prod(sizes) == size:
        return sizes
    on = ", ".join(f"{axes.names[a]}: {p}" for a, p in shards)
    raise LayoutError(
        f"Dim {d} of size {size} cannot be split as {on}.",
        why="The axes of one dim must have the same factors."
        if not sizes
        else f"The factors {sizes} do not multiply to {size}.",
        fix=f"Pass the same factors=(…), with product {size}, to each of them.",
    )
