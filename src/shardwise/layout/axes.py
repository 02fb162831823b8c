"""Mesh axes: their names and sizes, without devices or process groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.layout.errors import LayoutError

__all__ = ["Axes"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Axes:
    """The names and sizes of a mesh's axes; without names, an axis is named by its index.

    >>> axes = Axes((2, 4), ("dp", "tp"))
    >>> axes.index("tp"), axes.count, str(axes)
    (1, 8, 'dp=2, tp=4')
    >>> Axes((2, 4)).names
    ('0', '1')
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names or tuple(str(i) for i in range(len(self.sizes)))
        object.__setattr__(self, "names", names)
        if len(names) != len(self.sizes) or len(set(names)) != len(names):
            raise LayoutError(
                f"Axes got the names {names} for axes of sizes {self.sizes}.",
                why="Every axis needs one size and a unique name.",
                fix="Pass as many distinct names as sizes, like Axes((2, 4), ('dp', 'tp')).",
            )

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def count(self) -> int:
        """The number of ranks on the mesh."""
        return math.prod(self.sizes)

    def index(self, axis: str | int) -> int:
        """The index of an axis given by name or by index, which may be negative."""
        if isinstance(axis, str):
            if axis in self.names:
                return self.names.index(axis)
        elif -len(self.sizes) <= axis < len(self.sizes):
            return axis % len(self.sizes)
        raise LayoutError(
            f"The mesh has no axis {axis!r}.",
            why=f"Its axes are {self}.",
            fix=f"Use one of {', '.join(self.names)}.",
        )

    def sizes_of(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The sizes of some axes, given by index."""
        return tuple(self.sizes[a] for a in axes)

    def names_of(self, axes: Iterable[int]) -> tuple[str, ...]:
        """The names of some axes, given by index."""
        return tuple(self.names[a] for a in axes)

    def coord(self, number: int) -> tuple[int, ...]:
        """The coordinate at a position in row-major order."""
        out = []
        for size in reversed(self.sizes):
            number, c = divmod(number, size)
            out.append(c)
        return tuple(reversed(out))

    def number(self, coord: Sequence[int]) -> int:
        """The position of a coordinate in row-major order."""
        out = 0
        for c, size in zip(coord, self.sizes, strict=True):
            out = out * size + c
        return out

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
