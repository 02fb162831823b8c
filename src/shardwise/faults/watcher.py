"""The thread that looks for faults: why the program waits, whether other ranks have found a fault, and ending waits when there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from shardwise.faults.diagnose import World, behind, cause, died, find_overdue, gone, lost, stopped_ranks
from shardwise.faults.error import Fault
from shardwise.faults.program_thread import ProgramThread
from shardwise.faults.record import STILL, STUCK, WAIT, OwnRecord, Row
from shardwise.torch_internals.connections import break_connections, break_store_connection

__all__ = ["Watched", "Watcher"]

_TICK_SECONDS = 0.1
_GRACE_SECONDS = (
    0.4  # before a wait is looked into, and before a program that has not noticed a fault is interrupted
)
_STILL_SECONDS = 1.0  # before it is recorded that the program does nothing


class Watched(Protocol):
    """What the watcher needs of the session whose world it watches."""

    rank: int
    size: int
    fault: Fault | None
    record: OwnRecord
    store: Any
    user_wait: int
    is_patient: bool

    @property
    def timeout(self) -> float:
        """The seconds that a rank may wait in one collective."""

    def is_current(self) -> bool:
        """Whether the program has not destroyed the world."""

    def rows(self) -> Iterable[Row]:
        """The process groups whose collectives are counted."""

    def snapshot(self) -> World:
        """The records of all ranks of this machine."""

    def find_published(self) -> Fault | None:
        """The fault that a rank has found, if any."""

    def publish(self, fault: Fault) -> Fault:
        """Tell all ranks of a fault, and break the connections."""

    def note_handled(self, error: BaseException | None) -> None:
        """Record whether the program is still busy with an error that it raised."""

    def must_interrupt(self) -> bool:
        """Whether the program is guarded and has not been told of the fault."""

    def close(self) -> None:
        """End the watch."""


class Watcher:
    """A thread that looks at the program of the thread that creates it, and at the other ranks.

    Args:
        session: what it watches.
        interrupt: called where the program must be told of a fault and does not call a collective.
    """

    def __init__(self, session: Watched, interrupt: Callable[[], None]) -> None:
        self._session, self._interrupt = session, interrupt
        self.program = ProgramThread()
        self._fault_since = 0.0
        self._interrupted = self._looked = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise_faults", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; false if that was done before."""
        if self._end.is_set():
            return False
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)  # a thread that runs while the interpreter ends could end the process
        return True

    def cpu_seconds(self) -> float:
        """The CPU time that the thread has taken."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def _run(self) -> None:
        session = self._session
        while not self._end.wait(_TICK_SECONDS):
            if not session.is_current():
                session.note_handled(self.program.handled_error())
                session.close()
                return
            if session.fault is None and (fault := session.find_published()) is not None:
                session.fault = fault
                break_connections()
            self.program.look()
            still, waited = self.program.stood_still, self._waited()
            session.note_handled(self.program.handled_error())
            if session.fault is not None:
                self._end_waits()
            elif waited > _GRACE_SECONDS:
                self._look_into(waited)
            elif self.program.was_here > _GRACE_SECONDS:
                self._look_around(self.program.was_here)
            elif time.monotonic() - self._looked > _STILL_SECONDS:
                self._look_at_processes()
            self._tell_that_it_stands_still(still if not waited else 0.0)

    def _waited(self) -> float:
        """For how long the thread of the program has been waiting, in our collectives or in those it calls itself."""
        words, program = self._session.record.words, self.program
        if since := words[WAIT] or self._session.user_wait:
            return (time.monotonic_ns() - since) / 1e9
        if not program.functions:
            words[STUCK] = 0
            return 0.0
        waited = (time.monotonic_ns() - program.here_since) / 1e9
        if waited > _GRACE_SECONDS and not words[STUCK]:
            self._session.record.note(f"torch.distributed.{program.functions[-1]}", program.line())
            words[STUCK] = program.here_since
        return waited

    def _tell_that_it_stands_still(self, still: float) -> None:
        """Record where the program is if it waits for something else than a collective that is known here."""
        words = self._session.record.words
        if still < _STILL_SECONDS:
            words[STILL] = 0
        elif not words[STILL]:
            words[STILL] = self.program.still_since
            self._session.record.note("something else than a collective", self.program.line())

    def _look_into(self, waited: float) -> None:
        """Find out why this rank waits in a collective."""
        session = self._session
        world = session.snapshot()
        if session.record.words[WAIT]:
            rows = list(session.rows())
            late = sorted({*behind(world, rows), *gone(world, rows)})
        else:
            waiting = [rank for rank, record in world.records.items() if record.waits()]
            late = [rank for rank in range(session.size) if rank != session.rank and rank not in waiting]
        found = cause(world, late, waited)
        if found is None:  # also of those that have begun
            found = lost(world) if session.is_patient else died(world)
        # others may write or read for long in a checkpoint that they have begun, unless they are stopped
        is_overdue = late or stopped_ranks(world) or not session.is_patient
        if found is None and waited > session.timeout and is_overdue:
            found = find_overdue(world, late, waited, session.timeout)
        if found is not None:
            session.publish(found)

    def _look_around(self, waited: float) -> None:
        """Look for a rank that is lost: this one is in one call of C++ code, and perhaps waits for it there, as DDP does."""
        session = self._session
        world = session.snapshot()
        found = lost(world)
        if found is None and waited > session.timeout and (stopped := stopped_ranks(world)):
            found = find_overdue(world, stopped, waited, session.timeout)
        if found is not None:
            session.publish(found)

    def _look_at_processes(self) -> None:
        """Look for a rank that died inside of the guard in which this one computes."""
        self._looked = time.monotonic()
        if (found := died(self._session.snapshot())) is not None:
            self._session.publish(found)

    def _end_waits(self) -> None:
        """Tell the program of the fault where it does not notice that connections are broken."""
        now = time.monotonic()
        self._fault_since = self._fault_since or now
        if now - self._fault_since < _GRACE_SECONDS:
            return
        functions = self.program.functions
        if "init_process_group" in functions:
            return
        creates_group = "_new_process_group_helper" in functions
        if self._session.must_interrupt() and not creates_group and now - self._interrupted > _STILL_SECONDS:
            self._interrupted = now
            self._interrupt()
            return
        # again and again: on a busy machine the thread may look at the store too late, or go on to connect
        if self.program.was_here > _GRACE_SECONDS and (creates_group or self._session.must_interrupt()):
            break_store_connection(self._session.store)
            break_connections()
            self._fault_since = now
