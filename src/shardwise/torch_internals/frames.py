"""Frames of the running program, for messages that name a line of it."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["calling_frame"]


def calling_frame(thread: int | None = None) -> FrameType | None:
    """The frame of the caller's caller, or the innermost frame of another thread; None if that thread does not run.

    >>> calling_frame() is None, calling_frame(0) is None
    (False, True)
    """
    return sys._getframe(2) if thread is None else sys._current_frames().get(thread)
