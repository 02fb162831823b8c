"""Placements: what one axis of the mesh does with a tensor, as the API says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardwise.layout.errors import LayoutError

__all__ = ["REDUCE_OPS", "Partial", "Placement", "Replicate", "Shard"]

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")


class Placement:
    """What one axis of the mesh does with a tensor: `Shard`, `Replicate` or `Partial`."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits the tensor (along `dim`, where given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether each rank along the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the value is still to be reduced over the axis (by `reduce_op`, where given)."""
        return False


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """The axis splits tensor dim `dim`, as `torch.chunk` would.

    Several axes on one dim nest in the order of the mesh. Where they nest otherwise each carries its
    `order` (0 is outermost), and where a dim is a product of `factors` each says which `factor` it splits.

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
            raise TypeError(f"Shard takes the number of a tensor dim, not {self.dim!r}.")
        if self.factors and not 0 <= self.factor < len(self.factors):
            raise LayoutError(
                f"Shard of factor {self.factor} is out of range.",
                why=f"the dim has {len(self.factors)} factors, {self.factors}",
                fix=f"use a factor in 0..{len(self.factors) - 1}",
            )

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @property
    def is_plain(self) -> bool:
        """Whether the dim alone says it all, as it does in torch."""
        return self.order is None and not self.factors

    def _rest(self) -> str:
        order = "" if self.order is None else f", order={self.order}"
        return order + (f", factors={self.factors}, factor={self.factor}" if self.factors else "")

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}{self._rest()})"

    def __str__(self) -> str:
        return f"S({self.dim}{self._rest()})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Each rank along the axis holds the same.

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
    """Each rank along the axis holds a part; the value is their `sum`, `avg`, `max`, `min` or `product`.

    >>> str(Partial()), Partial("max"), Partial().is_partial("max")
    ('P(sum)', Partial(max), False)
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({self.reduce_op!r}) is not a placement.",
                why="there is no such reduction",
                fix=f"use one of {', '.join(REDUCE_OPS)}",
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"
