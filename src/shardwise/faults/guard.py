"""`guard`: an error on one rank is an error on all ranks."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from types import TracebackType

from shardwise.faults.current import current_session, interrupts, watch_world
from shardwise.faults.diagnose import raised
from shardwise.faults.record import ENDED, GUARDED, GUARDS, LEFT, RAISED, STATE
from shardwise.faults.scope import finishers, guards
from shardwise.faults.session import Session

__all__ = ["guard"]

_ALIKE_SECONDS = 1.0  # for the other ranks to raise, too, or to return
_CERTAIN_SECONDS = 5.0  # the same, for errors that all ranks raise


class guard(ContextDecorator):  # noqa: N801 - a context manager that reads as a word
    """Let an error that one rank raises inside the block end the block on all ranks.

    The other ranks, which would wait for that rank for ever, raise a `PeerError` within 2 seconds that names the rank, the source
    line and the error. A rank that dies, returns without calling a collective that others call, or stops is named in the same
    way. An error that all ranks raise, or that is caught inside the block, is an ordinary error. As a decorator, `@guard()`, it
    guards each call. `launch` and `python -m shardwise run` guard what they run.

    Args:
        timeout: the seconds that a rank waits in one collective before the missing ranks are named; by default that of the enclosing
            guard, or of the environment variable SHARDWISE_TIMEOUT, or 1800.

    Raises:
        PeerError: another rank failed.

    It communicates nothing: ranks of one machine know of each other through memory. A checkpoint that is being saved in the background is
    waited for at the end, and an error of it is raised.

    >>> with guard(timeout=60):
    ...     pass
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"guard: timeout is {timeout}.\n"
                "  why: It is the number of seconds that a rank may wait in one collective.\n"
                "  fix: Pass a number above 0, or None for the default."
            )
        self._timeout = timeout

    def __enter__(self) -> guard:
        session = watch_world()
        if session is not None and not guards:
            session.record.words[GUARDS] += 1
            session.record.words[STATE] = GUARDED
        if not guards:
            interrupts.install()
        guards.append(self._timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and len(guards) == 1:
            try:
                for finish in finishers:
                    finish()
            except BaseException as failed:
                self._leave(failed)
                raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        guards.pop()
        if not guards:
            interrupts.remove()
        session = current_session()
        if session is None:
            return
        if error is not None and (found := session.explain(error)) is not None:
            raise found from error
        if guards:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            session.record.words[STATE] = LEFT
        elif session.fault is None:
            _tell(session, error)


def _tell(session: Session, error: BaseException) -> None:
    """Let the other ranks know of an error, and take the groups down if some of them go on without noticing."""
    session.raised.note(error)
    words = session.record.words
    words[STATE] = RAISED
    is_alike = getattr(error, "is_alike", False)
    deadline = time.monotonic() + (_CERTAIN_SECONDS if is_alike else _ALIKE_SECONDS)
    while time.monotonic() < deadline:
        world = session.snapshot()
        others = [record for rank, record in world.records.items() if rank != session.rank]
        if session.fault is not None or (
            len(others) == session.size - 1
            and all(
                r.words[STATE] in (LEFT, RAISED, ENDED) and r.words[GUARDS] == words[GUARDS] for r in others
            )
        ):
            return
        time.sleep(0.01)
    session.publish(raised(session.snapshot(), session.rank, session.record.error()))
