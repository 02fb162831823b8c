"""The errors of elastic runs: each states what happened, why, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

__all__ = ["ElasticError", "LeftBehindError", "StateLostError"]


class ElasticError(RuntimeError):
    """An elastic run cannot go on; the base of the errors of this package."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), why=self.why, fix=self.fix), (self.what,)


class LeftBehindError(ElasticError):
    """The other ranks went on without this one, which did not answer in time."""


class StateLostError(ElasticError):
    """No rank that is left holds some of the values of the last commit.

    Attributes:
        names: the tensors that are lost, in whole or in part.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", names: Sequence[str] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.names = tuple(names)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), why=self.why, fix=self.fix, names=self.names), (self.what,)
