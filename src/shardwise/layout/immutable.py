"""The base class of interned values."""

from __future__ import annotations

from typing import Self

__all__ = ["Immutable"]


class Immutable:
    """A value whose attributes are set once, by its constructor; its copies are the object itself."""

    __slots__ = ()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: {type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"cannot delete {name}: {type(self).__name__} is immutable")

    # what `object` has, but stated: torch takes a class for a constant of a graph only if it says what equality is
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
