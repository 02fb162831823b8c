"""The errors of checkpoints: each states what happened, why, and how to fix it."""

from __future__ import annotations

from functools import partial

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointStateError",
    "CheckpointWriteError",
    "CorruptCheckpointError",
    "NoCheckpointError",
]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the base of the errors of this package."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), why=self.why, fix=self.fix), (self.what,)


class NoCheckpointError(CheckpointError):
    """There is no complete checkpoint at the given path."""


class CorruptCheckpointError(CheckpointError):
    """The files of a checkpoint are damaged, missing or not those that were written."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint does not fit what it is loaded into: keys or shapes differ."""


class CheckpointStateError(CheckpointError):
    """A state has a value that cannot be saved, or differs between ranks."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written; none exists at its path, or the one from before."""


ERRORS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        NoCheckpointError,
        CorruptCheckpointError,
        CheckpointMismatchError,
        CheckpointStateError,
        CheckpointWriteError,
    )
}
"""The errors by name, as one rank tells another."""
