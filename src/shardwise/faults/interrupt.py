"""Raising an error in the main thread from another thread: where it sleeps, waits for a lock or a process, or computes.

A signal that is ignored by default makes Python call a handler in the main thread, which raises the error. Calls of the operating
system that wait end at once; code that computes raises at its next instruction in Python.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

_SIGNAL = getattr(signal, "SIGURG", None)
_OPS = str(Path("torch", "_ops.py"))


class Interrupts:
    """The handler of the signal, while it is installed.

    It raises nothing while a module is imported, which would leave half of it behind, or an op is looked up, where torch takes any
    `RuntimeError` for a missing name: whoever sends the signal sends it again if the program goes on.

    Args:
        check: called in the main thread when the signal arrives; what it returns, unless None, is raised there.
    """

    def __init__(self, check: Callable[[], BaseException | None]) -> None:
        self._check = check
        self._before: Any = None
        self.installed = False

    def install(self) -> None:
        """Install the handler, if this is the main thread and the program has none of its own."""
        if _SIGNAL is None or self.installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
            self._before = signal.signal(_SIGNAL, self._handle)
            self.installed = True

    def remove(self) -> None:
        """Put back what was there before."""
        if self.installed and _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self.installed = False
            if signal.getsignal(_SIGNAL) == self._handle:
                signal.signal(_SIGNAL, self._before)

    def send(self) -> None:
        """Have the main thread call `check`, if the handler is installed."""
        if self.installed and _SIGNAL is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _is_looked_up(frame):
            return
        if (error := self._check()) is not None:
            raise error


def _is_looked_up(frame: FrameType | None) -> bool:
    """Whether a module or an op is being looked up."""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith("<frozen importlib") or (name == "__getattr__" and file.endswith(_OPS)):
            return True
        frame = frame.f_back
    return False
