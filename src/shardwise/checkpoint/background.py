"""Saves in the background: one at a time, whose failure is never lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext

from shardwise.faults import current_session
from shardwise.faults.scope import finishers

__all__ = ["SaveHandle", "abandon_pending", "finish_pending", "start"]


class SaveHandle:
    """A save that runs in the background."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._error: BaseException | None = None
        # not a daemon: a program that ends waits for its checkpoint
        self._thread = threading.Thread(target=self._work, name="shardwise checkpoint")
        self._thread.start()

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            del self._run  # and the copies with it

    def done(self) -> bool:
        """Whether the checkpoint is there, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: it could not be written; the same on all ranks.
            PeerError: a rank of the same guard has died, has left, or has not begun to save within the timeout.
        """
        session = current_session()
        # in a wait that is watched: a rank that does not save as this one does is found as in a save that is waited for
        with nullcontext() if session is None else session.patient_wait():
            self._thread.join()
        if _pending[0] is self:
            _pending[0] = None
        if self._error is not None:
            raise self._error


_pending: list[SaveHandle | None] = [None]


def start(run: Callable[[], None]) -> SaveHandle:
    """Run a save in the background."""
    handle = _pending[0] = SaveHandle(run)
    return handle


def finish_pending() -> None:
    """Wait for the save that runs in the background, and raise what it raised."""
    if (handle := _pending[0]) is not None:
        handle.wait()


def abandon_pending() -> None:
    """Forget the save that runs in the background, whatever becomes of it: ranks that it needs are gone."""
    if (handle := _pending[0]) is not None:
        handle._thread.join()
        _pending[0] = None


def _fail_at_exit() -> None:
    """End the process with exit code 1 if a background save failed and its handle was never waited on."""
    handle = _pending[0]
    if handle is None:
        return
    handle._thread.join()
    if handle._error is not None:
        traceback.print_exception(handle._error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


finishers.append(finish_pending)  # `launch` returns when the checkpoint is there, or raises
atexit.register(_fail_at_exit)
