"""The watch over this process's world: its collectives are recorded and compared, and faults are told to the other ranks."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.faults.diagnose import World, behind, broken_connection, cause, diverged, lost
from shardwise.faults.error import Fault, PeerError
from shardwise.faults.folder import Folder
from shardwise.faults.peers import Groups, Records
from shardwise.faults.raised_errors import RaisedErrors
from shardwise.faults.record import ENDED, GUARDED, GUARDS, STATE, STUCK, WAIT, OwnRecord, Row
from shardwise.faults.scope import guards, is_uninterrupted, wait_limit
from shardwise.faults.source_line import line_of_stack
from shardwise.faults.watcher import Watcher
from shardwise.torch_internals.collectives import Note, monitors, wait_unwatched
from shardwise.torch_internals.connections import break_connections, world_store
from shardwise.torch_internals.direct_collectives import is_done, take_work

__all__ = ["Session"]

_SEARCH_SECONDS = 1.2  # for the cause of a connection that broke
_NEARBY_SECONDS = 0.4  # of it, among the ranks that this one waits for; one that dies closes its connections a moment before it is gone
_POLL_SECONDS = 0.02
_BLOCK = timedelta(seconds=0.5)  # in gloo, before it is asked whether a fault is known
_CONNECTION_BROKE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|pair closure|connectfullmesh|"
    r"timed out waiting|socket timeout|wait timeout|failed to (recv|send)|was likely closed"
)


class Session:
    """The watch over one world, from its first process group on a mesh until it is destroyed.

    Args:
        interrupt: raises `error_to_raise()` in the main thread, wherever it is.

    Attributes:
        rank: of this process.
        size: of the world.
        fault: the fault of this world, once one is known.
        record: what this rank does, for the others to read.
        raised: the errors that this rank raised.
        store: the store of the world.
        user_wait: since when the program waits for a collective that it called itself, in monotonic nanoseconds; 0 if it does not.
        is_patient: the program waits for ranks that may take longer than the timeout once they have begun, as to write a checkpoint.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        # A reference would keep gloo's threads after the group is destroyed. They end the process if they release a tensor while
        # the interpreter ends.
        self._world = weakref.ref(dist.group.WORLD)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.fault: Fault | None = None
        self.store = world_store()
        self._folder = Folder(self.store, self.rank)
        self.record = OwnRecord(self.rank, self._folder.path_of(self.rank))
        self._records = Records(self._folder, self.record, self.size)
        if guards:  # the world was created inside of it
            self.record.words[GUARDS], self.record.words[STATE] = 1, GUARDED
        self._groups = Groups(self.record, self._records)
        self.raised = RaisedErrors(self.record)
        self._told = False  # whether the program has got an error for the fault
        self.user_wait = 0
        self.is_patient = False
        self._watcher = Watcher(self, interrupt)

    @property
    def timeout(self) -> float:
        """The seconds that a rank may wait in one collective."""
        return wait_limit()

    # the monitor of collectives

    def is_current(self) -> bool:
        """Whether the program has not destroyed this world and begun another."""
        world = dist.group.WORLD
        return world is not None and world is self._world()

    def begin(self, group: str, note: Note) -> bool:
        """Record a collective that is about to begin; raise if the world is broken, or another rank began another one.

        Returns:
            Whether the group uses gloo.
        """
        if self.fault is not None:
            raise self.peer_error(self.fault)
        source = line_of_stack()
        if (error := sys.exception()) is not None:
            self.raised.begin_with(error)
        found = self._groups.begin(group, note, source)
        if found is not None:
            text = f"{source[0]}:{source[1]} in {source[2]}"
            fault = diverged(self.snapshot(), found.rank, note.text, text, found.row, found.place)
            raise self.peer_error(self.publish(fault))
        return self._groups.is_gloo(group)

    def wait(self, tensor: Tensor) -> Tensor:
        """Wait for a collective; a connection that broke is an error that names the rank that is the cause."""
        words = self.record.words
        words[WAIT] = time.monotonic_ns()
        started = take_work(tensor)
        try:
            if started is None:
                return wait_unwatched(tensor)
            while not is_done(started.work, _BLOCK):
                self.raise_fault()  # broken connections did not end the wait
            return wait_unwatched(tensor) if started.is_registered else tensor
        except RuntimeError as error:
            if (found := self.explain(error)) is None:
                raise
            raise found from error
        finally:
            words[WAIT] = 0

    def wait_for(
        self,
        wait: Callable[[], Any],
        is_done: Callable[[timedelta], bool] | None = None,
        in_thread: bool = False,
    ) -> Any:
        """Wait for a collective that the program called itself; see `wait`.

        Args:
            wait: the wait.
            is_done: waits for some time, and returns whether `wait` would not have to.
            in_thread: nothing ends the wait, not even that connections break. Another thread does it, which is given up then.
        """
        if threading.get_ident() != self._watcher.program.ident:
            return wait()
        self.user_wait = self.record.words[STUCK] = time.monotonic_ns()
        try:
            while is_done is not None and not is_done(_BLOCK):
                self.raise_fault()
            return self._wait_in_thread(wait) if in_thread else wait()
        except RuntimeError as error:
            if (found := self.explain(error)) is None:
                raise
            raise found from error
        finally:
            self.user_wait = self.record.words[STUCK] = 0

    def _wait_in_thread(self, wait: Callable[[], Any]) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(wait())
            except BaseException as error:
                errors.append(error)  # raised below, in the thread of the program
                if not isinstance(error, Exception):
                    raise

        thread = threading.Thread(target=run, name="shardwise_wait", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            self.raise_fault()
        if errors:
            raise errors[0]
        return results[0]

    @contextmanager
    def patient_wait(self) -> Iterator[None]:
        """Wait in the block for ranks that do the same, which may take longer than the timeout if they have begun."""
        if threading.get_ident() != self._watcher.program.ident:
            yield
            return
        self.is_patient, self.record.words[WAIT] = True, time.monotonic_ns()
        try:
            yield
        finally:
            self.is_patient, self.record.words[WAIT] = False, 0

    # what other modules use

    def rows(self) -> Iterable[Row]:
        """The process groups whose collectives are counted."""
        return self._groups.rows()

    def snapshot(self) -> World:
        """The records of all ranks of this machine."""
        return World(self.size, self.record, self._records.all(), frozenset(self.raised.texts))

    def find_published(self) -> Fault | None:
        """The fault that a rank has published, if any."""
        return self._folder.fault()

    def publish(self, fault: Fault) -> Fault:
        """Tell all ranks of a fault, break the connections, and return the fault that was first."""
        self.fault = self._folder.publish(fault)
        break_connections()
        return self.fault

    def peer_error(self, fault: Fault) -> PeerError:
        """The error to raise for a fault, in the program."""
        self._told = self._told or threading.get_ident() == self._watcher.program.ident
        return PeerError(fault)

    def raise_fault(self) -> None:
        """Raise the fault of this world if one is known."""
        if self.fault is not None:
            raise self.peer_error(self.fault)

    def must_interrupt(self) -> bool:
        """Whether the program is guarded and has not got an error for the fault."""
        is_guarded = bool(guards) and not is_uninterrupted()
        return self.fault is not None and is_guarded and not self._told and self.is_current()

    def error_to_raise(self) -> PeerError | None:
        """The error of a program that must be interrupted."""
        return self.peer_error(self.fault) if self.fault is not None and self.must_interrupt() else None

    def explain(self, error: BaseException) -> PeerError | None:
        """The error to raise instead of one that a broken connection caused; None for other errors."""
        if isinstance(error, PeerError) or not isinstance(error, RuntimeError):
            return None
        is_known = self.fault is not None and self.rank not in self.fault.ranks
        if not is_known and not _CONNECTION_BROKE.search(str(error)):
            return None
        start = time.monotonic()
        while self.fault is None and (fault := self._folder.fault()) is None:
            world, searched = self.snapshot(), time.monotonic() - start
            # ranks that this one waits for, or that are lost; a rank that has returned may have nothing to do with it
            found = cause(world, behind(world, self.rows()), waited=float("inf")) or lost(world)
            if found is None and searched > _NEARBY_SECONDS:
                others = [rank for rank in range(self.size) if rank != self.rank]
                found = cause(world, others, waited=float("inf"))
            if found is None and searched > _SEARCH_SECONDS:
                found = broken_connection(world, str(error).partition("\n")[0])
            if found is not None:
                fault = found
                break
            time.sleep(_POLL_SECONDS)
        return self.peer_error(self.publish(self.fault or fault))  # type: ignore[arg-type]

    def note_handled(self, error: BaseException | None) -> None:
        """Record whether the program is busy with an error that it raised; `error` is the one that it is handling."""
        self.raised.look(error)

    def close(self) -> None:
        """End the watch; other ranks that wait for this one are told that it has left."""
        if not self._watcher.stop():
            return
        error = sys.exception() or self._watcher.program.handled_error()
        if error is not None and not isinstance(error, PeerError):
            self.raised.note(error)  # the world is destroyed because of it
        self.record.words[STATE] = ENDED
        if monitors and monitors[0] is self:
            monitors.clear()
        world = self.snapshot()
        left = [r.words[STATE] == ENDED or r.process() == "gone" for r in world.records.values()]
        # a rank without a record may be about to join: the world that removed its folder could not tell it that this rank has left
        local = min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))
        self._folder.leave(all(left) and len(left) >= local)

    def watcher_seconds(self) -> float:
        """The CPU time that the watching thread has taken."""
        return self._watcher.cpu_seconds()
