"""Frames of the running program, for messages that name a line of it."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["calling_frame"]


def calling_frame(thread: int | None = None, depth: int = 1) -> FrameType | None:
    """The frame of the caller's caller, or the innermost frame of another thread; None if that thread does not run.

    Args:
        thread: the other thread.
        depth: how many callers further out, instead of one.

    >>> calling_frame() is None, calling_frame(0) is None
    (False, True)
    """
    return sys._getframe(depth + 1) if thread is None else sys._current_frames().get(thread)
