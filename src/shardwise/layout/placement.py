"""Placements: how one mesh axis holds a tensor, in the terms of the public API."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final

from shardwise.layout.errors import LayoutError

__all__ = [
    "REDUCE_OPS",
    "MaskPartial",
    "OffsetMode",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
]

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")


class Placement:
    """How one mesh axis holds a tensor: `Shard`, `Replicate` or `Partial`."""

    __slots__ = ("__weakref__",)  # torch.compile keeps the values of a graph by weak reference

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits the tensor (along `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether the ranks along the axis hold the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction over the axis is pending (by `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """The axis splits tensor dim `dim` into the blocks of `torch.chunk`.

    Axes that split the same dim nest in mesh order, unless each states its `order` (0 is outermost). If the dim is
    viewed as a product of `factors`, outermost first, `factor` is the index of the one that the axis splits.

    >>> str(Shard(0)), Shard(0), Shard(0, order=1), Shard(0, factors=(4, 6), factor=1)
    ('S(0)', Shard(dim=0), Shard(dim=0, order=1), Shard(dim=0, factors=(4, 6), factor=1))
    >>> Shard(1).is_shard(1), Shard(1).is_shard(0)
    (True, False)
    """

    dim: int
    order: int | None = None
    factors: tuple[int, ...] = ()
    factor: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise TypeError(f"Shard takes the index of a tensor dim, an int, not {self.dim!r}.")
        if self.factors and not 0 <= self.factor < len(self.factors):
            raise LayoutError(
                f"{self} has a factor out of range.",
                why=f"The dim has {len(self.factors)} factors, {self.factors}.",
                fix=f"Use a factor in 0..{len(self.factors) - 1}.",
            )

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @property
    def is_plain(self) -> bool:
        """Whether the dim describes it completely, as in torch: no `order` and no `factors`."""
        return self.order is None and not self.factors

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """The size of block `rank` of `num_chunks`, and where it begins.

        >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
        """
        step = -(-curr_local_size // num_chunks)
        begin = min(rank * step, curr_local_size)
        return min(step, curr_local_size - begin), begin

    def _local_shard_size_and_offset(self, size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        return self.local_shard_size_and_offset(size, num_chunks, rank)

    def _split_tensor(
        self, tensor: Any, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Any], list[int]]:
        """The blocks of a tensor, padded with zeros to equal sizes if asked for, and the sizes of the padding."""
        size = tensor.shape[self.dim]
        spans = [self.local_shard_size_and_offset(size, num_chunks, rank) for rank in range(num_chunks)]
        blocks = [tensor.narrow(self.dim, begin, length) for length, begin in spans]
        padding = [spans[0][0] - length for length, _ in spans]
        if with_padding and any(padding):
            blocks = [_pad(b, self.dim, n) for b, n in zip(blocks, padding, strict=True)]
        return [b.contiguous() if contiguous else b for b in blocks], padding if with_padding else []

    def _select_split_tensor(
        self,
        tensor: Any,
        num_chunks: int,
        index: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
        clone: bool = True,
    ) -> Any:
        """One of the blocks of `_split_tensor`, as a copy if asked for."""
        blocks, _ = self._split_tensor(tensor, num_chunks, with_padding=with_padding, contiguous=contiguous)
        return blocks[index].clone() if clone else blocks[index]

    def _options(self) -> str:
        order = "" if self.order is None else f", order={self.order}"
        return order + (f", factors={self.factors}, factor={self.factor}" if self.factors else "")

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}{self._options()})"

    def __str__(self) -> str:
        return f"S({self.dim}{self._options()})"


def _pad(block: Any, dim: int, count: int) -> Any:
    """A block with zeros added at the end of a dim."""
    shape = list(block.shape)
    shape[dim] += count
    out = block.new_zeros(shape)
    out.narrow(dim, 0, block.shape[dim]).copy_(block)
    return out


def _joined(pieces: list[Any], dim: int) -> Any:
    """Pieces of a dim, one after the other."""
    shape = list(pieces[0].shape)
    shape[dim] = sum(p.shape[dim] for p in pieces)
    out = pieces[0].new_empty(shape)
    at = 0
    for piece in pieces:
        out.narrow(dim, at, piece.shape[dim]).copy_(piece)
        at += piece.shape[dim]
    return out


class OffsetMode(IntEnum):
    """What `StridedShard.local_shard_size_and_offset` returns of the indices of a block."""

    FIRST = 0
    ALL = 1
    NONE = 2


@dataclass(frozen=True, slots=True, repr=False)
class StridedShard(Placement):
    """torch's way to write that an axis splits the blocks of later axes, or a factor of the dim: `_StridedShard`.

    It is not a `Shard`, as in torch. Layouts have the order or the factors in its place; a tensor that was given one gives
    it back.

    >>> StridedShard(0, split_factor=2), StridedShard(0, split_factor=2).is_shard()
    (_StridedShard(dim=0, sf=2), False)
    """

    dim: int
    split_factor: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise TypeError(f"_StridedShard takes the index of a tensor dim, an int, not {self.dim!r}.")
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise LayoutError(
                f"_StridedShard({self.dim}) got split_factor={self.split_factor!r}.",
                why="It is the number of blocks that the dim is already split into.",
                fix="Use an int of at least 1.",
            )

    def _split_tensor(
        self, tensor: Any, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Any], list[int]]:
        """The blocks of a tensor: each has a part of each of `split_factor` equal parts of the dim."""
        parts, _ = Shard(self.dim)._split_tensor(
            tensor, self.split_factor, with_padding=False, contiguous=False
        )
        pieces = [Shard(self.dim)._split_tensor(p, num_chunks, with_padding=False)[0] for p in parts]
        blocks = [_joined([piece[rank] for piece in pieces], self.dim) for rank in range(num_chunks)]
        sizes = [b.shape[self.dim] for b in blocks]
        padding = [max(sizes) - n for n in sizes]
        if with_padding and any(padding):
            blocks = [_pad(b, self.dim, n) for b, n in zip(blocks, padding, strict=True)]
        return blocks, padding if with_padding else []

    def local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: int, offset_mode: int = OffsetMode.FIRST
    ) -> tuple[int, int | list[int] | None]:
        """The size of block `rank` of `num_chunks`, and what `offset_mode` says: its first index (-1 if it is empty), all, or None.

        >>> StridedShard(0, split_factor=2).local_shard_size_and_offset(9, 4, 1, OffsetMode.ALL)
        (3, [2, 3, 6])
        """
        indices: list[int] = []
        for part in range(self.split_factor):
            size, begin = Shard.local_shard_size_and_offset(curr_local_size, self.split_factor, part)
            length, first = Shard.local_shard_size_and_offset(size, num_chunks, rank)
            indices += range(begin + first, begin + first + length)
        match OffsetMode(offset_mode):
            case OffsetMode.FIRST:
                return len(indices), indices[0] if indices else -1
            case OffsetMode.ALL:
                return len(indices), indices
        return len(indices), None

    _local_shard_size_and_offset = local_shard_size_and_offset

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """The ranks along the axis hold the same values.

    >>> str(Replicate()), Replicate(), Replicate().is_replicate()
    ('R', Replicate(), True)
    """

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """The ranks along the axis hold partial values; their `sum`, `avg`, `max`, `min` or `product` is pending.

    >>> str(Partial()), Partial("max"), Partial().is_partial("max"), Partial("prod") == Partial("product")
    ('P(sum)', Partial(max), False, True)
    """

    reduce_op: str = "sum"

    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")

    def __post_init__(self) -> None:
        if self.reduce_op == "prod":  # as torch's own functions call it
            object.__setattr__(self, "reduce_op", "product")
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({self.reduce_op!r}) is not a placement.",
                why="The reduction is unknown.",
                fix=f"Use one of {', '.join(REDUCE_OPS)}.",
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or {"prod": "product"}.get(reduce_op, reduce_op) == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


@dataclass(frozen=True, slots=True, repr=False)
class MaskPartial(Partial):
    """torch's placement of a lookup in a split table: `_MaskPartial`. Here it is a pending sum; rows of other ranks are zeros.

    >>> MaskPartial(offset_shape=(8, 2)), MaskPartial().is_partial("sum")
    (_MaskPartial(offset_shape=(8, 2), offset_dim=0), True)
    """

    mask_buffer: Any = field(default=None, compare=False)
    offset_shape: tuple[int, ...] | None = None
    offset_dim: int = 0

    def __repr__(self) -> str:
        return f"_MaskPartial(offset_shape={self.offset_shape}, offset_dim={self.offset_dim})"

    def __str__(self) -> str:
        return "MaskP"
