"""What a dim of a view is made of, under torch's names; ours is the view algebra of layouts, `shardwise.layout.view`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DimSpec", "Flatten", "InputDim", "Singleton", "Split", "infer_size", "view_groups"]


@dataclass(frozen=True)
class DimSpec:
    """What a dim of a view is made of."""


@dataclass(frozen=True)
class Singleton(DimSpec):
    """A dim of size 1 that the view adds."""


@dataclass(frozen=True)
class InputDim(DimSpec):
    """A dim of the input."""

    input_dim: int


@dataclass(frozen=True)
class Flatten(DimSpec):
    """Several dims as one, outermost first."""

    input_dims: tuple[DimSpec, ...]


@dataclass(frozen=True)
class Split(DimSpec):
    """Dim `split_id` of those of sizes `group_shape` that a dim is divided into."""

    input_dim: DimSpec
    group_shape: tuple[int, ...]
    split_id: int


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
    # groups of dims, input and result, with the same number of elements; dims of size 1 in the result stand alone
    ins = [d for d, n in enumerate(from_size) if n != 1]
    out: list[DimSpec] = [Singleton()] * len(after)
    group_in: list[int] = []
    group_out: list[int] = []
    size_in = size_out = 1
    for j in (j for j, n in enumerate(after) if n != 1):
        group_out.append(j)
        size_out *= after[j]
        while ins and size_in < size_out:
            group_in.append(ins.pop(0))
            size_in *= from_size[group_in[-1]]
        if size_in == size_out:
            _describe(out, group_in, group_out, after)
            group_in, group_out, size_in, size_out = [], [], 1, 1
    return tuple(out)


def _describe(
    out: list[DimSpec], group_in: Sequence[int], group_out: Sequence[int], after: Sequence[int]
) -> None:
    """Enter what the result's dims of a group are made of."""
    parts = tuple(InputDim(d) for d in group_in)
    whole = parts[0] if len(parts) == 1 else Flatten(parts)
    shape = tuple(after[j] for j in group_out)
    for i, j in enumerate(group_out):
        out[j] = whole if len(group_out) == 1 else Split(whole, shape, i)
