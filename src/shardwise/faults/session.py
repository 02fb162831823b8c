"""The watch over this process's world: its collectives are recorded, and a thread looks for faults."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.faults.diagnose import (
    World,
    behind,
    broken_connection,
    cause,
    diverged,
    find_overdue,
    lost,
    stopped_ranks,
)
from shardwise.faults.error import Fault, PeerError
from shardwise.faults.folder import Folder
from shardwise.faults.program_thread import ProgramThread
from shardwise.faults.record import (
    ENDED,
    GUARDED,
    GUARDS,
    STATE,
    STILL,
    STUCK,
    WAIT,
    OwnRecord,
    Record,
    Row,
    signature_at,
)
from shardwise.faults.source_line import line_of_error, line_of_stack
from shardwise.torch_internals.collectives import Note, monitors, wait_unwatched
from shardwise.torch_internals.connections import break_connections, break_store_connection, world_store
from shardwise.torch_internals.process_groups import ranks_are_threads, resolve_group
from shardwise.torch_internals.user_collectives import watch_user_collectives

__all__ = ["Session", "current_session", "guards", "note_error", "watch_world"]

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.4  # before a wait is looked into
_STILL_SECONDS = 1.0  # before it is recorded that the program does nothing
_SEARCH_SECONDS = 1.2  # for the cause of a connection that broke
_CONNECTION_BROKE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|pair closure|connectfullmesh|"
    r"timed out waiting|socket timeout|wait timeout|failed to (recv|send)|was likely closed"
)


class Session:
    """The watch over one world, from its first process group on a mesh until it is destroyed."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.fault: Fault | None = None
        self._store = world_store()
        self._folder = Folder(self._store, self.rank)
        self.record = OwnRecord(self.rank, self._folder.path_of(self.rank))
        self._records: dict[int, Record] = {self.rank: self.record}
        if guards:  # the world was created inside of it
            self.record.words[GUARDS], self.record.words[STATE] = 1, GUARDED
        self._rows: dict[str, tuple[Row, list[_Peer]]] = {}
        self.errors: deque[str] = deque(maxlen=64)  # that this rank raised
        self._op_error: tuple[int, str] | None = None
        self._program = ProgramThread()
        self._user_wait = 0  # since when the program waits for a collective that it called itself
        self._broken_since = 0.0
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="shardwise_faults", daemon=True)
        self._watcher.start()

    @property
    def timeout(self) -> float:
        """The seconds that a rank may wait in one collective; torch's own default is 30 minutes, too."""
        inner = next((limit for limit in reversed(guards) if limit is not None), None)
        return float(os.environ.get("SHARDWISE_TIMEOUT", "1800")) if inner is None else inner

    # the monitor of collectives

    def is_current(self) -> bool:
        """Whether the program has not destroyed this world and begun another."""
        return dist.group.WORLD is self.world

    def begin(self, group: str, note: Note) -> None:
        """Record a collective that is about to begin; raise if the world is broken, or another rank began another one."""
        if self.fault is not None:
            raise PeerError(self.fault)
        known = self._rows.get(group)
        if known is None or not self.record.holds(known[0]):
            known = self._add_group(group)
        row, peers = known
        source = line_of_stack()
        count = self.record.begin(row, note.text, note.signature, source)
        for peer in peers:
            if (words := peer.words) is None:
                if not peer.connect(self.record_of, row.key):
                    continue
                words = peer.words
            base = peer.base
            if words[base] != row.key:
                peer.words = None
            elif (seen := signature_at(words, base, count)) is not None and seen != note.signature:
                source_text = f"{source[0]}:{source[1]} in {source[2]}"
                world = self.snapshot()
                raise PeerError(self.publish(diverged(world, peer.rank, note.text, source_text, row, count)))

    def wait(self, tensor: Tensor) -> Tensor:
        """Wait for a collective; a connection that broke is an error that names the rank that is the cause."""
        words = self.record.words
        words[WAIT] = time.monotonic_ns()
        try:
            return wait_unwatched(tensor)
        except RuntimeError as error:
            if (found := self.explain(error)) is None:
                raise
            raise found from error
        finally:
            words[WAIT] = 0

    def wait_for(self, wait: Callable[[], Any]) -> Any:
        """Wait for a collective that the program called itself; see `wait`."""
        if threading.get_ident() != self._program.ident:
            return wait()
        self._user_wait = self.record.words[STUCK] = time.monotonic_ns()
        try:
            return wait()
        except RuntimeError as error:
            if (found := self.explain(error)) is None:
                raise
            raise found from error
        finally:
            self._user_wait = self.record.words[STUCK] = 0

    def _add_group(self, group: str) -> tuple[Row, list[_Peer]]:
        ranks = tuple(dist.get_process_group_ranks(resolve_group(group)))
        row = self.record.add_row(group, ranks)
        known = self._rows[group] = (row, [_Peer(rank) for rank in ranks if rank != self.rank])
        return known

    # what other modules use

    def record_of(self, rank: int) -> Record | None:
        """The record of a rank, if it is on this machine and has started."""
        known = self._records.get(rank)
        if known is None and (found := self._folder.record_of(rank)) is not None:
            known = self._records[rank] = found
        return known

    def snapshot(self) -> World:
        """The records of all ranks of this machine."""
        for rank in range(self.size):
            self.record_of(rank)
        return World(self.size, self.record, dict(self._records), frozenset(self.errors))

    def publish(self, fault: Fault) -> Fault:
        """Tell all ranks of a fault, break the connections, and return the fault that was first."""
        self.fault = self._folder.publish(fault)
        break_connections()
        return self.fault

    def explain(self, error: BaseException) -> PeerError | None:
        """The error to raise instead of one that a broken connection caused; None for other errors."""
        if isinstance(error, PeerError) or not isinstance(error, RuntimeError):
            return None
        is_known = self.fault is not None and self.rank not in self.fault.ranks
        if not is_known and not _CONNECTION_BROKE.search(str(error)):
            return None
        deadline = time.monotonic() + _SEARCH_SECONDS
        while self.fault is None and (fault := self._folder.fault()) is None:
            world = self.snapshot()
            others = [rank for rank in range(self.size) if rank != self.rank]
            found = cause(world, others, waited=float("inf"))
            if found is None and time.monotonic() > deadline:
                found = broken_connection(world, str(error).partition("\n")[0])
            if found is not None:
                fault = found
                break
            time.sleep(0.02)
        return PeerError(self.publish(self.fault or fault))  # type: ignore[arg-type]

    def note_error(self, error: BaseException, text: str | None = None) -> None:
        """Record an error that this rank raised, for the other ranks if they wait in vain.

        Args:
            error: the error.
            text: what it is about, with the op that raised it; by default what was given for the same error before, or the line.
        """
        if text is not None:
            self._op_error = (id(error), text)
        elif self._op_error is not None and self._op_error[0] == id(error):
            text = self._op_error[1]
        else:
            text = _describe(error)
        self.errors.append(text)
        self.record.post_error(text)

    def close(self) -> None:
        """End the watch; other ranks that wait for this one are told that it has left."""
        if self._end.is_set():
            return
        self._end.set()
        self.record.words[STATE] = ENDED
        if monitors and monitors[0] is self:
            monitors.clear()
        world = self.snapshot()
        left = [r.words[STATE] == ENDED or r.process() == "gone" for r in world.records.values()]
        self._folder.leave(all(left))

    # the watcher

    def watcher_seconds(self) -> float:
        """The CPU time that the watching thread has taken."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._watcher.ident or 0))

    def _watch(self) -> None:
        """Look for faults until the world is destroyed."""
        while not self._end.wait(_TICK_SECONDS):
            if dist.group.WORLD is not self.world:
                self.close()
                return
            if self.fault is None and (fault := self._folder.fault()) is not None:
                self.fault = fault
                break_connections()
            self._program.look()
            still, waited = self._program.stood_still, self._waited()
            if self.fault is not None:
                self._end_wait_for_store(waited)
            elif waited > _GRACE_SECONDS:
                self._look_into(waited)
            elif still > _GRACE_SECONDS:
                self._look_around(still)
            self._tell_that_it_stands_still(still if not waited else 0.0)

    def _waited(self) -> float:
        """For how long the thread of the program has been waiting, in our collectives or in those it calls itself."""
        words = self.record.words
        if since := words[WAIT] or self._user_wait:
            return (time.monotonic_ns() - since) / 1e9
        if not self._program.functions:
            words[STUCK] = 0
            return 0.0
        waited = (time.monotonic_ns() - self._program.here_since) / 1e9
        if waited > _GRACE_SECONDS and not words[STUCK]:
            self.record.note(f"torch.distributed.{self._program.functions[-1]}", self._program.line())
            words[STUCK] = self._program.here_since
        return waited

    def _tell_that_it_stands_still(self, still: float) -> None:
        """Record where the program is if it waits for something else than a collective that is known here."""
        words = self.record.words
        if still < _STILL_SECONDS:
            words[STILL] = 0
        elif not words[STILL]:
            words[STILL] = self._program.still_since
            self.record.note("something else than a collective", self._program.line())

    def _look_into(self, waited: float) -> None:
        """Find out why this rank waits in a collective."""
        world = self.snapshot()
        if self.record.words[WAIT]:
            late = behind(world, [row for row, _ in list(self._rows.values()) if self.record.holds(row)])
        else:
            waiting = [rank for rank, record in world.records.items() if record.waits()]
            late = [rank for rank in range(self.size) if rank != self.rank and rank not in waiting]
        found = cause(world, late, waited)
        if found is None and waited > self.timeout:
            found = find_overdue(world, late, waited, self.timeout)
        if found is not None:
            self.publish(found)

    def _look_around(self, still: float) -> None:
        """Look for a rank that is lost: this one does nothing, and perhaps waits for it in C++ code, as DDP does."""
        world = self.snapshot()
        found = lost(world)
        if found is None and still > self.timeout and (stopped := stopped_ranks(world)):
            found = find_overdue(world, stopped, still, self.timeout)
        if found is not None:
            self.publish(found)

    def _end_wait_for_store(self, waited: float) -> None:
        """End the wait of a program that creates a group: it waits for a key of the store, not for a connection."""
        self._broken_since = self._broken_since or time.monotonic()
        if waited < _GRACE_SECONDS or time.monotonic() - self._broken_since < _GRACE_SECONDS:
            return
        functions = self._program.functions
        if "_new_process_group_helper" in functions and "init_process_group" not in functions:
            # again and again: on a busy machine the thread may look at the store too late, or go on to connect
            break_store_connection(self._store)
            break_connections()
            self._broken_since = time.monotonic()


class _Peer:
    """Another rank of a group: where its record has the words of the group, once they are known."""

    __slots__ = ("base", "rank", "words")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.words: Any = None
        self.base = 0

    def connect(self, record_of: Callable[[int], Record | None], key: int) -> bool:
        """Find the words; they are not there before the rank's first collective of the group."""
        record = record_of(self.rank)
        base = None if record is None else record.find_row(key)
        if record is None or base is None:
            return False
        self.words, self.base = record.words, base
        return True


_sessions: list[Session] = []
guards: list[float | None] = []
"""The timeouts of the guards that the program is in, the outermost first."""


def current_session() -> Session | None:
    """The watch over the current world, if it has begun."""
    return _sessions[-1] if _sessions and _sessions[-1].world is dist.group.WORLD else None


_ONE_PROCESS = (
    "fake",
    "threaded",
)  # backends whose other ranks do not exist, or are threads: nobody dies alone


def watch_world() -> Session | None:
    """Begin to watch the current world, unless that has begun; None where there is nothing to watch."""
    if (known := current_session()) is not None:
        return known
    for session in _sessions:
        session.close()
    _sessions.clear()
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() in _ONE_PROCESS:
        return None
    if ranks_are_threads():  # which fail together, in one process
        return None
    watch_user_collectives()
    session = Session()
    _sessions.append(session)
    monitors[:] = [session]
    return session


def note_error(error: BaseException, what: Callable[[], str]) -> None:
    """Keep an error that an op raised on this rank, in case others do not raise it; `what` describes the op."""
    session = current_session()
    if session is None or isinstance(error, PeerError):
        return
    file, line, name = line_of_stack()
    session.note_error(error, f"{what()} at {file}:{line} in {name}\n  {type(error).__name__}: {error}")


def _describe(error: BaseException) -> str:
    """An error of the user's program: its source line and message."""
    file, line, name = line_of_error(error.__traceback__)
    what = "".join(traceback.format_exception_only(error)).strip()
    return f"{file}:{line} in {name}\n  {what}"


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    for session in _sessions:
        if isinstance(error, BaseException) and not isinstance(error, PeerError):
            session.note_error(error)
        session.close()


def _after_fork() -> None:
    """A child is not a rank: it has a copy of the record, and no watcher."""
    _sessions.clear()
    monitors.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
