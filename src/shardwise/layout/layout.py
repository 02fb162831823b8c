"""Layout: how a tensor of a given shape lies on a mesh of given axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Self
from weakref import WeakValueDictionary

from shardwise.layout.axes import Axes
from shardwise.layout.errors import LayoutError
from shardwise.layout.factor import Dim, Factor, canonical
from shardwise.layout.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from shardwise.layout.text import layout_text

__all__ = ["Layout"]

_Key = tuple[Axes, tuple[Dim, ...], tuple[tuple[int, str], ...]]


class Layout:
    """Each dim as factors with the axes that split them, and the axes still to be reduced.

    Interned: equal layouts are the same object.

    >>> axes = Axes((2, 2), ("dp", "tp"))
    >>> Layout.of((8, 6), axes, (Shard(0), Partial()))
    [8:dp, 6] P(tp,sum)
    >>> Layout.of((8,), axes, (Shard(0, order=1), Shard(0, order=0)))
    [8:tp,dp]
    """

    __slots__ = ("__weakref__", "_placements", "axes", "dims", "partial", "shape")

    axes: Axes
    dims: tuple[Dim, ...]
    partial: tuple[tuple[int, str], ...]
    shape: tuple[int, ...]
    _placements: tuple[Placement, ...] | None

    _known: ClassVar[WeakValueDictionary[_Key, Layout]] = WeakValueDictionary()

    def __new__(
        cls, axes: Axes, dims: Iterable[Iterable[Factor]], partial: Mapping[int, str] | None = None
    ) -> Self:
        sizes = axes.sizes
        clean = tuple(canonical(dim, sizes) for dim in dims)
        rest = tuple(sorted((a, op) for a, op in (partial or {}).items() if sizes[a] > 1))
        known = cls._known.get((axes, clean, rest))
        if known is not None:
            return known  # type: ignore[return-value]
        _check_axes(axes, clean, rest)
        new = object.__new__(cls)
        set_ = object.__setattr__
        set_(new, "axes", axes)
        set_(new, "dims", clean)
        set_(new, "partial", rest)
        set_(new, "shape", tuple(math.prod(f.size for f in dim) for dim in clean))
        set_(new, "_placements", None)
        # setdefault: two threads that come here together must leave with one object.
        return cls._known.setdefault((axes, clean, rest), new)  # type: ignore[return-value]

    @classmethod
    def of(cls, shape: Sequence[int], axes: Axes, placements: Sequence[Placement]) -> Layout:
        """The layout that one placement per axis describes."""
        placements = _normalised(tuple(shape), axes, placements)
        dims = [_dim_of(size, d, axes, placements) for d, size in enumerate(shape)]
        partial = {a: p.reduce_op for a, p in enumerate(placements) if isinstance(p, Partial)}
        return cls(axes, dims, partial)

    @classmethod
    def replicated(cls, shape: Sequence[int], axes: Axes) -> Layout:
        """Each rank holds it all."""
        return cls(axes, [(Factor(size),) for size in shape])

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The same as one placement per axis."""
        if self._placements is None:
            out: list[Placement] = [Replicate()] * len(self.axes)
            for axis, op in self.partial:
                out[axis] = Partial(op)
            for d, dim in enumerate(self.dims):
                factors = tuple(f.size for f in dim) if len(dim) > 1 else ()
                for i, f in enumerate(dim):
                    ordered = tuple(sorted(f.axes)) == f.axes
                    for order, axis in enumerate(f.axes):
                        out[axis] = Shard(d, None if ordered else order, factors, i if factors else 0)
            object.__setattr__(self, "_placements", tuple(out))
        return self._placements  # type: ignore[return-value]

    @property
    def ndim(self) -> int:
        """How many dims the tensor has."""
        return len(self.dims)

    @property
    def sharded(self) -> frozenset[int]:
        """The axes that split some dim."""
        return frozenset(a for dim in self.dims for f in dim for a in f.axes)

    def with_dim(self, d: int, *factors: Factor) -> Layout:
        """The same layout with dim `d` written as these factors."""
        return Layout(self.axes, [*self.dims[:d], factors, *self.dims[d + 1 :]], dict(self.partial))

    def with_dims(self, dims: Iterable[Iterable[Factor]]) -> Layout:
        """The same partial axes over other dims."""
        return Layout(self.axes, dims, dict(self.partial))

    def with_partial(self, partial: Mapping[int, str]) -> Layout:
        """The same dims with other axes still to be reduced."""
        return Layout(self.axes, self.dims, partial)

    def without(self, axes: Iterable[int]) -> Layout:
        """The same layout with these axes replicated."""
        gone = frozenset(axes)
        dims = [[Factor(f.size, tuple(a for a in f.axes if a not in gone)) for f in dim] for dim in self.dims]
        return Layout(self.axes, dims, {a: op for a, op in self.partial if a not in gone})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is a value: it has no {name} to set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout is a value: it has no {name} to delete")

    def __hash__(self) -> int:
        return id(self) >> 4

    def __eq__(self, other: object) -> bool:
        return self is other

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.axes, self.dims, dict(self.partial))

    def __repr__(self) -> str:
        return self.text()

    def text(self, dtype: str = "") -> str:
        """The text form, preceded by the short name of a dtype where one is given."""
        return layout_text(self.axes, self.dims, self.partial, dtype)


def _check_axes(axes: Axes, dims: tuple[Dim, ...], partial: tuple[tuple[int, str], ...]) -> None:
    used = [a for dim in dims for f in dim for a in f.axes] + [a for a, _ in partial]
    for a in used:
        if used.count(a) > 1:
            raise LayoutError(
                f"axis {axes.names[a]} is used {used.count(a)} times.",
                why="an axis splits one factor of one dim, or is partial, or replicates",
                fix="name it once",
            )
    ops = {op for _, op in partial}
    if bad := ops - set(REDUCE_OPS):
        raise LayoutError(
            f"{sorted(bad)} cannot be pending.",
            why="no such reduction",
            fix=f"use one of {', '.join(REDUCE_OPS)}",
        )
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"Mixed Partial reduce types are not supported: {', '.join(sorted(ops))} on one tensor.",
            why="such reductions do not commute, so their order would change the value",
            fix="use one reduction for all Partial axes (sum and avg may mix)",
        )


def _normalised(shape: tuple[int, ...], axes: Axes, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements with dims counted from the front, checked against shape and mesh."""
    if not isinstance(placements, Sequence):
        raise TypeError(
            f"placements are {placements!r}.\n"
            f"  why: they are a list with one placement for each axis of the mesh ({axes})\n"
            f"  fix: placements=[{placements!r}]"
        )
    if len(placements) != len(axes):
        raise LayoutError(
            f"`placements` must have the same length as the mesh: {len(placements)} for {len(axes)} axes.",
            why=f"each axis of the mesh ({axes}) needs one placement, got {_names(placements)}",
            fix="add Replicate() for the axes that should not split the tensor"
            if len(placements) < len(axes)
            else "leave out what is too many",
        )
    out: list[Placement] = []
    for a, p in enumerate(placements):
        if not isinstance(p, Shard | Replicate | Partial):
            raise TypeError(
                f"axis {axes.names[a]} has {p!r} of {type(p).__module__} for a placement.\n"
                "  why: a placement is Shard(dim), Replicate() or Partial(op) of shardwise\n"
                "  fix: "
                + (f"write {p.__name__}(…)" if isinstance(p, type) else "import them from shardwise")
            )
        if isinstance(p, Shard):
            if not -len(shape) <= p.dim < len(shape):
                raise LayoutError(
                    f"Shard({p.dim}) on axis {axes.names[a]} is out of range for shape {shape}.",
                    why=f"the tensor has {len(shape)} dims",
                    fix=f"use a dim in {-len(shape)}..{len(shape) - 1}" if shape else "use Replicate()",
                )
            p = Shard(p.dim % len(shape), p.order, p.factors, p.factor)
        out.append(p)
    return tuple(out)


def _names(placements: Sequence[Placement]) -> str:
    return f"({', '.join(str(p) for p in placements)})"


def _dim_of(size: int, d: int, axes: Axes, placements: Sequence[Placement]) -> Dim:
    """The factors of one dim, from the placements that split it."""
    shards = [(a, p) for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == d]
    sizes = _factor_sizes(size, d, axes, shards)
    groups: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    for a, p in shards:
        # a plain Shard beside factored ones is outermost: torch writes fsdp-inside-tp that way
        groups[p.factor if p.factors else 0].append((a if p.order is None else p.order, a, a))
    return tuple(
        Factor(s, tuple(a for *_, a in sorted(group))) for s, group in zip(sizes, groups, strict=True)
    )


def _factor_sizes(size: int, d: int, axes: Axes, shards: Sequence[tuple[int, Shard]]) -> tuple[int, ...]:
    said = {p.factors for _, p in shards if p.factors}
    if not said:
        return (size,)
    (sizes,) = said if len(said) == 1 else ((),)
    if sizes and math.prod(sizes) == size:
        return sizes
    on = ", ".join(f"{axes.names[a]}: {p}" for a, p in shards)
    raise LayoutError(
        f"dim {d} of size {size} cannot be cut as {on}.",
        why="the axes of one dim must name the same factors"
        if not sizes
        else f"{sizes} do not multiply to {size}",
        fix=f"give each of them factors=(…) with product {size}",
    )
