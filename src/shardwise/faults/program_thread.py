"""The thread of the program, as another thread sees it: where it is, and for how long it has not moved on."""

from __future__ import annotations

import sys
import threading
import time

from shardwise.faults.source_line import line_of_stack

__all__ = ["ProgramThread"]

_WAITING_FILES = ("distributed_c10d.py", "_functional_collectives.py")


class ProgramThread:
    """The thread that creates it, watched by another one that calls `look` again and again.

    Attributes:
        ident: its id.
        here_since: since when it has been at one instruction, in monotonic nanoseconds.
        still_since: since when it has been there without computing: it waits, for whatever.
        functions: the functions of torch.distributed that it is in, the outermost last; none if it is in other code.
    """

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.ident)
        self._place: object = None
        self._computed = 0
        self.here_since = self.still_since = time.monotonic_ns()
        self.functions: tuple[str, ...] = ()

    def look(self) -> None:
        """See where the thread is now."""
        frame = sys._current_frames().get(self.ident)
        place = None if frame is None else (id(frame), frame.f_lasti)
        try:
            computed = time.clock_gettime_ns(self._clock)
        except OSError:  # the thread has ended
            computed = time.monotonic_ns()
        now = time.monotonic_ns()
        if place != self._place:
            self.here_since = self.still_since = now
        elif computed != self._computed:
            self.still_since = now
        self._place, self._computed = place, computed
        functions = []
        while frame is not None and frame.f_code.co_filename.endswith(_WAITING_FILES):
            functions.append(frame.f_code.co_name)
            frame = frame.f_back
        self.functions = tuple(functions)

    @property
    def was_here(self) -> float:
        """For how many seconds it had been at one instruction when it was looked at, waiting or computing."""
        return (time.monotonic_ns() - self.here_since) / 1e9

    @property
    def stood_still(self) -> float:
        """For how many seconds it had not computed when it was looked at."""
        return (time.monotonic_ns() - self.still_since) / 1e9

    def handled_error(self) -> BaseException | None:
        """The error that it is handling: it is in an `except` or `finally` block because of it."""
        found = sys._current_exceptions().get(self.ident)
        # Python 3.11 has the type, the error and the traceback
        error = found[1] if isinstance(found, tuple) else found
        return error if isinstance(error, BaseException) else None

    def line(self) -> tuple[str, int, str]:
        """File, line and function of the program that it is at."""
        return line_of_stack(self.ident)
