"""The folder in memory through which the ranks of a machine know of each other: their records, and the first fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
import uuid
from typing import Any

from shardwise.faults.error import Fault
from shardwise.faults.record import Record

__all__ = ["FOLDER_VARIABLE", "Folder"]

FOLDER_VARIABLE = "SHARDWISE_FAULTS_FOLDER"
"""The environment variable that says where to make the folder; in shared memory by default."""
_PREFIX = "shardwise-faults-"
_SETTLED_SECONDS = 60.0  # a folder that is younger may belong to ranks that are about to join


class Folder:
    """The folder of the world's ranks on this machine; the rank that comes first makes it.

    Args:
        store: the store of the world, which tells the other ranks the name of the folder. It is not used afterwards: it is gone
            with the process that serves it.
        rank: the rank of this process.
    """

    def __init__(self, store: Any, rank: int) -> None:
        attempt = store.add(f"shardwise/faults/{rank}", 1)  # worlds that use one store one after the other
        key = f"shardwise/faults/{attempt}/{socket.gethostname()}"
        parent = os.environ.get(FOLDER_VARIABLE) or (
            "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        )
        mine = os.path.join(parent, f"{_PREFIX}{os.getuid()}-{uuid.uuid4().hex[:12]}")
        self.path = store.compare_set(key, "", mine).decode()
        if self.path == mine:
            _sweep(parent)
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        self.rank = rank
        self._fault = os.path.join(self.path, "fault.json")

    def path_of(self, rank: int) -> str:
        """Where the record of a rank is."""
        return os.path.join(self.path, f"rank{rank}")

    def record_of(self, rank: int) -> Record | None:
        """The record of a rank, or None if it is not on this machine or has not started."""
        try:
            return Record(rank, self.path_of(rank))
        except (OSError, ValueError):
            return None

    def fault(self) -> Fault | None:
        """The fault of this world, if there is one."""
        try:
            with open(self._fault, "rb") as file:
                return Fault.decode(file.read())
        except OSError:
            return None

    def publish(self, fault: Fault) -> Fault:
        """Tell all ranks of a fault, and return the one that was first."""
        aside = os.path.join(self.path, f"fault{self.rank}-{uuid.uuid4().hex[:8]}")
        try:
            with open(aside, "wb") as file:
                file.write(fault.encode())
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._fault)
            os.unlink(aside)
        except OSError:  # another rank has removed the folder: all ranks have left
            return fault
        return self.fault() or fault

    def leave(self, others_left: bool) -> None:
        """Remove the folder, if this is the last rank to leave."""
        if others_left:
            shutil.rmtree(self.path, ignore_errors=True)


def _sweep(parent: str) -> None:
    """Remove the folders of worlds whose processes are all gone."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if not name.startswith(f"{_PREFIX}{os.getuid()}-"):
            continue
        with contextlib.suppress(OSError):  # another process removes it
            is_old = time.time() - os.stat(path).st_mtime > _SETTLED_SECONDS
            if is_old and all(_is_gone(os.path.join(path, file)) for file in os.listdir(path)):
                shutil.rmtree(path, ignore_errors=True)


def _is_gone(path: str) -> bool:
    if not os.path.basename(path).startswith("rank"):
        return True
    try:
        record = Record(-1, path)
    except (OSError, ValueError):
        return True
    try:
        return record.process() == "gone"
    finally:
        record.close()
