"""Errors that say what, why and how to fix it."""

from __future__ import annotations

__all__ = ["LayoutError"]


# Both bases: torch raises ValueError for some of these and RuntimeError for others, and programs that
# catch either must go on working.
class LayoutError(ValueError, RuntimeError):
    """A layout that cannot be, or cannot be reached, told as what, why and fix.

    >>> raise LayoutError("Shard(3) is out of range.", why="the tensor has 2 dims", fix="use a dim in -2..1")
    Traceback (most recent call last):
    shardwise.layout.errors.LayoutError: Shard(3) is out of range.
      why: the tensor has 2 dims
      fix: use a dim in -2..1
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what = what
        self.why = why
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.what, self.why, self.fix)


def _rebuild(what: str, why: str, fix: str) -> LayoutError:
    return LayoutError(what, why=why, fix=fix)
