"""The guards that the program is in, what must not be interrupted inside of them, and what must be done when they are left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["finishers", "guards", "is_uninterrupted", "uninterrupted", "wait_limit"]

guards: list[float | None] = []
"""The timeouts of the guards that the program is in, the outermost first."""
finishers: list[Callable[[], None]] = []
"""Called when the outermost guard is left without an error: they wait for work in the background, and raise what it raised."""
_blocks = [0]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block end before the program is told of a fault of another rank, where it neither waits nor communicates."""
    _blocks[0] += 1
    try:
        yield
    finally:
        _blocks[0] -= 1


def is_uninterrupted() -> bool:
    """Whether the program is in such a block.

    >>> with uninterrupted():
    ...     is_uninterrupted()
    True
    """
    return _blocks[0] > 0


def wait_limit() -> float:
    """The seconds that a rank may wait in one collective; torch's own default is 30 minutes, too.

    >>> guards.append(60.0)
    >>> wait_limit()
    60.0
    >>> guards.clear()
    """
    inner = next((limit for limit in reversed(guards) if limit is not None), None)
    return float(os.environ.get("SHARDWISE_TIMEOUT", "1800")) if inner is None else inner
