"""The guards that the program is in."""

from __future__ import annotations

import os

__all__ = ["guards", "wait_limit"]

guards: list[float | None] = []
"""The timeouts of the guards that the program is in, the outermost first."""


def wait_limit() -> float:
    """The seconds that a rank may wait in one collective; torch's own default is 30 minutes, too.

    >>> guards.append(60.0)
    >>> wait_limit()
    60.0
    >>> guards.clear()
    """
    inner = next((limit for limit in reversed(guards) if limit is not None), None)
    return float(os.environ.get("SHARDWISE_TIMEOUT", "1800")) if inner is None else inner
