"""The error types of layouts: every error states what happened, why, and how to fix it."""

from __future__ import annotations

from functools import partial

__all__ = ["DimError", "LayoutError", "PlacementTypeError"]


# Two bases, because torch raises ValueError for some of these errors and RuntimeError for others: code that catches
# either one keeps working.
class LayoutError(ValueError, RuntimeError):
    """An invalid layout, or one that cannot be reached.

    >>> raise LayoutError("Shard(3) is out of range.", why="The tensor has 2 dims.", fix="Use a dim in -2..1.")
    Traceback (most recent call last):
    shardwise.layout.errors.LayoutError: Shard(3) is out of range.
      why: The tensor has 2 dims.
      fix: Use a dim in -2..1.
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what = what
        self.why = why
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), why=self.why, fix=self.fix), (self.what,)


# torch raises IndexError, AssertionError or RuntimeError for a dim that the tensor does not have, by the function.
class DimError(LayoutError, IndexError, AssertionError):
    """A placement splits a dim that the tensor does not have."""


# torch raises RuntimeError for a placement that it does not know.
class PlacementTypeError(LayoutError, TypeError):
    """A placement is of another type."""
