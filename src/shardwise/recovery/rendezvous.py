"""How the members of an elastic run find out who is left: through files in a folder, which no rank takes with it when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.faults import FOLDER_VARIABLE
from shardwise.faults.processes import process_state, start_time
from shardwise.recovery.errors import ElasticError, LeftBehindError

__all__ = ["Meeting", "Rendezvous"]

_PAUSE_SECONDS = 0.005


class Meeting(NamedTuple):
    """Who is left, in the order of their new ranks, and what each of them reported."""

    members: tuple[int, ...]
    reports: Mapping[int, Mapping[str, Any]]


class Rendezvous:
    """The folder of an elastic run, and this process's place in it.

    A member of the run is known by its rank in the first world. Files are written aside and renamed, so whoever sees one sees all of it.

    Args:
        folder: a directory that all members can read and write.
        member: this process.
        timeout: seconds to wait for members that are alive, or on another machine.
    """

    def __init__(self, folder: Path, member: int, timeout: float) -> None:
        self.folder, self.member, self.timeout = folder, member, timeout
        self._processes: dict[int, tuple[str, int, int]] = {}

    @classmethod
    def join(cls, store: Any, rank: int, size: int, folder: Path | None, timeout: float) -> Rendezvous:
        """Join as a member of the first world, whose store tells all ranks which folder it is.

        Raises:
            ElasticError: the ranks are on several machines, and no folder was given.
        """
        call = store.add(f"shardwise/elastic/{rank}", 1)  # runs that use one store one after the other
        prefix = f"shardwise/elastic/{call}"
        if rank == 0:
            parent = folder or os.environ.get(FOLDER_VARIABLE) or None
            store.set(f"{prefix}/folder", tempfile.mkdtemp(prefix="shardwise-elastic-", dir=parent))
        process = [socket.gethostname(), os.getpid(), start_time(os.getpid())]
        store.set(f"{prefix}/{rank}", json.dumps(process))
        where = Path(store.get(f"{prefix}/folder").decode())
        out = cls(where, rank, timeout)
        for other in range(size):
            host, pid, started = json.loads(store.get(f"{prefix}/{other}"))
            out._processes[other] = host, pid, started
        hosts = {host for host, *_ in out._processes.values()}
        if len(hosts) > 1 and folder is None:
            raise ElasticError(
                f"elastic was called on {len(hosts)} machines without a folder: {', '.join(sorted(hosts))}.",
                why="The ranks that are left meet in a folder, because the store of the process group may be gone with rank 0.",
                fix='elastic(train, ..., folder="/a/directory/that/all/machines/share")',
            )
        return out

    def meet(self, generation: int, before: Sequence[int], report: Mapping[str, Any]) -> Meeting | None:
        """Agree with the other members that are left on who they are; None if the run has been finished.

        Args:
            generation: the number of the new world.
            before: the members of the world before.
            report: what the others get to know of this one.

        Raises:
            LeftBehindError: the others have agreed without this member.
        """
        self._write(f"{generation}-{self.member}", report)
        end = time.monotonic() + self.timeout
        while (members := self._read(f"{generation}")) is None:
            if self.is_finished():
                return None
            here = [m for m in before if self._exists(f"{generation}-{m}")]
            awaited = [m for m in before if m not in here and self._may_come(m)]
            if not awaited or time.monotonic() > end:
                self._write(f"{generation}", here, exclusive=True)
            else:
                time.sleep(_PAUSE_SECONDS)
        if self.member not in members:
            raise LeftBehindError(
                f"The others went on without member {self.member}, as {members}.",
                why=f"It was stopped, or took longer than {self.timeout:g} s to notice that another rank was gone.",
                fix="Start the run again from its last checkpoint to use all ranks; elastic(..., timeout=seconds) waits longer.",
            )
        reports = {m: self._read(f"{generation}-{m}") for m in members}
        return Meeting(tuple(members), reports)

    def _may_come(self, member: int, even_stopped: bool = False) -> bool:
        """Whether a member may still come: it has not left, and its process runs as far as can be seen from here."""
        if self._exists(f"left-{member}"):
            return False
        host, pid, started = self._processes[member]
        states = ("runs", "stopped") if even_stopped else ("runs",)
        return host != socket.gethostname() or process_state(pid, started) in states

    def world_file(self, generation: int) -> str:
        """Where the store of a world is."""
        return str(self.folder / f"world-{generation}")

    def is_finished(self) -> bool:
        """Whether a member knows that all of them have finished."""
        return self._exists("finished")

    def finish(self) -> None:
        """Say that all members have finished."""
        self._write("finished", True)

    def leave(self) -> None:
        """Leave the run, so that the other members do not wait for this one; the last to leave removes the folder."""
        with contextlib.suppress(OSError):
            self._write(f"left-{self.member}", True)
            # a process that is stopped may go on later, and is told that it was left behind
            if not any(self._may_come(m, even_stopped=True) for m in self._processes):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _exists(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: Any, exclusive: bool = False) -> None:
        """Write a file; `exclusive` leaves one that is there as it is."""
        aside = self.folder / f".{uuid.uuid4().hex}"
        aside.write_text(json.dumps(value))
        target = self.folder / f"{name}.json"
        if not exclusive:
            aside.rename(target)
            return
        with contextlib.suppress(FileExistsError):
            os.link(aside, target)
        aside.unlink()
