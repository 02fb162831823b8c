"""The watch over the current world: begun with its first mesh or guard, ended with the world or the program."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from shardwise.faults.error import PeerError
from shardwise.faults.interrupt import Interrupts
from shardwise.faults.session import Session
from shardwise.faults.source_line import line_of_stack
from shardwise.torch_internals.collectives import monitors
from shardwise.torch_internals.connections import settle_threads
from shardwise.torch_internals.process_groups import ranks_are_threads
from shardwise.torch_internals.user_collectives import watch_user_collectives

__all__ = ["current_session", "interrupts", "note_error", "watch_world"]

_sessions: list[Session] = []


def _error_to_raise() -> PeerError | None:
    return None if (session := current_session()) is None else session.error_to_raise()


interrupts = Interrupts(_error_to_raise)
"""What raises a `PeerError` in a guarded program that does not call collectives."""


def current_session() -> Session | None:
    """The watch over the current world, if it has begun."""
    return _sessions[-1] if _sessions and _sessions[-1].is_current() else None


def watch_world() -> Session | None:
    """Begin to watch the current world, unless that has begun; None where there is nothing to watch."""
    if (known := current_session()) is not None:
        return known
    for session in _sessions:
        session.close()
    _sessions.clear()
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    if ranks_are_threads():  # which fail together, in one process
        return None
    watch_user_collectives()
    session = Session(interrupts.send)
    _sessions.append(session)
    monitors[:] = [session]
    return session


def note_error(error: BaseException, what: Callable[[], str]) -> None:
    """Keep an error that an op raised on this rank, in case others do not raise it; `what` describes the op."""
    session = current_session()
    if session is None or isinstance(error, PeerError):
        return
    file, line, name = line_of_stack()
    session.raised.note(error, f"{what()} at {file}:{line} in {name}\n  {type(error).__name__}: {error}")


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    for session in _sessions:
        if isinstance(error, BaseException) and not isinstance(error, PeerError):
            session.raised.note(error)
        session.close()
    if _sessions:
        settle_threads()


def _after_fork() -> None:
    """A child is not a rank: it has a copy of the record, and no watcher."""
    _sessions.clear()
    monitors.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
