"""What a dim of a view is made of, under torch's names; ours is the view algebra of layouts, `shardwise.layout.view`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Broadcast",
    "DimSpec",
    "Flatten",
    "InputDim",
    "NewDim",
    "Repeat",
    "Singleton",
    "Split",
    "infer_size",
    "view_groups",
]


@dataclass(frozen=True)
class DimSpec:
    """What a dim of a view is made of."""

    def inputs(self) -> Iterable[DimSpec]:
        """The dims that it is made of directly."""
        return ()


@dataclass(frozen=True)
class Singleton(DimSpec):
    """A dim of size 1 that the view adds."""


@dataclass(frozen=True)
class InputDim(DimSpec):
    """A dim of the input."""

    input_dim: int


@dataclass(frozen=True)
class Broadcast(DimSpec):
    """A dim of size 1 that is expanded."""

    dim: DimSpec
    dim_size: int

    @classmethod
    def new(cls, dim: DimSpec, dim_size: int) -> DimSpec:
        """The dim, expanded."""
        return cls(dim, dim_size)

    def inputs(self) -> Iterable[DimSpec]:
        return (self.dim,)


@dataclass(frozen=True)
class NewDim(DimSpec):
    """A dim of any size that the view adds."""

    size: int

    @classmethod
    def new(cls, size: int) -> DimSpec:
        """A new dim; one of size 1 is a `Singleton`."""
        return Singleton() if size == 1 else cls(size)


@dataclass(frozen=True)
class Repeat(DimSpec):
    """A dim, several times one after the other."""

    input_dim: DimSpec
    times: int

    @classmethod
    def new(cls, dim: DimSpec, times: int) -> DimSpec:
        """The dim, repeated; repeating a dim of size 1 is expanding it."""
        if times == 1:
            return dim
        return Broadcast(dim, times) if isinstance(dim, Singleton) else cls(dim, times)

    def inputs(self) -> Iterable[DimSpec]:
        return (self.input_dim,)


@dataclass(frozen=True)
class Flatten(DimSpec):
    """Several dims as one, outermost first."""

    input_dims: Sequence[DimSpec]

    @classmethod
    def new(cls, dims: Sequence[DimSpec]) -> DimSpec:
        """The dims as one: a dim of size 1 for none, the dim itself for one."""
        if not dims:
            return Singleton()
        return dims[0] if len(dims) == 1 else cls(tuple(dims))

    def inputs(self) -> Iterable[DimSpec]:
        return self.input_dims


@dataclass(frozen=True)
class Split(DimSpec):
    """Dim `split_id` of those of sizes `group_shape` that a dim is divided into."""

    input_dim: DimSpec
    group_shape: tuple[int, ...]
    split_id: int

    @classmethod
    def new(cls, dim: DimSpec, group_shape: Sequence[int], idx: int) -> DimSpec:
        """A part of the dim; parts of size 1 are `Singleton`, and an only part is the dim itself."""
        sizes = tuple(group_shape)
        if len(sizes) == 1:
            return dim
        if sizes[idx] == 1:
            return Singleton()
        before = sum(n != 1 for n in sizes[:idx])
        sizes = tuple(n for n in sizes if n != 1)
        return dim if len(sizes) == 1 else cls(dim, sizes, before)

    def inputs(self) -> Iterable[DimSpec]:
        return (self.input_dim,)


def infer_size(total_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes with -1 replaced by what is left.

    >>> infer_size(12, (3, -1))
    (3, 4)
    """
    if -1 not in sizes:
        return tuple(sizes)
    known = math.prod(n for n in sizes if n != -1)
    if sizes.count(-1) > 1 or known == 0 or total_size % known:
        raise ValueError(
            f"infer_size({total_size}, {tuple(sizes)}) has no answer.\n"
            "  why: One size may be -1, and the others must divide the total.\n"
            "  fix: Pass sizes whose product is the total."
        )
    return tuple(total_size // known if n == -1 else n for n in sizes)


def view_groups(from_size: Sequence[int], to_size: Sequence[int]) -> tuple[DimSpec, ...]:
    """For each dim of a view, what it is made of.

    >>> view_groups((2, 3, 4), (6, 2, 2))[0]
    Flatten(input_dims=(InputDim(input_dim=0), InputDim(input_dim=1)))
    >>> view_groups((2, 3), (1, 2, 3))
    (Singleton(), InputDim(input_dim=0), InputDim(input_dim=1))
    """
    total = math.prod(from_size)
    after = infer_size(total, to_size)
    if math.prod(after) != total:
        raise ValueError(
            f"A tensor of shape {tuple(from_size)} has no view of shape {after}.\n"
            "  why: The numbers of elements differ.\n"
            "  fix: Pass sizes whose product is the same."
        )
    out: list[DimSpec] = []
    i = j = 0
    while i < len(from_size) or j < len(after):
        i_end, j_end = _group_end(from_size, after, i, j)
        whole = Flatten.new([InputDim(d) for d in range(i, i_end)])
        out += [Split.new(whole, after[j:j_end], k) for k in range(j_end - j)]
        i, j = i_end, j_end
    return tuple(out)


def _group_end(from_size: Sequence[int], to_size: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """Where the smallest group of dims ends, of input and result, that begins at `i` and `j` and has as many elements in both.

    A dim of size 1 faces another one, or else stands alone.
    """
    size_in = from_size[i] if i < len(from_size) else 1
    size_out = to_size[j] if j < len(to_size) else 1
    if (size_in == 1) != (size_out == 1):
        return (i + 1, j) if size_in == 1 and i < len(from_size) else (i, j + 1)
    i_end, j_end = min(i + 1, len(from_size)), min(j + 1, len(to_size))
    while size_in != size_out:
        if size_in < size_out:
            size_in, i_end = size_in * from_size[i_end], i_end + 1
        else:
            size_out, j_end = size_out * to_size[j_end], j_end + 1
    return i_end, j_end
