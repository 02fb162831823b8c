"""The directories in which checkpoints are written before they take their places."""

from __future__ import annotations

import os
import shutil
import socket
import zlib
from glob import escape
from pathlib import Path

from shardwise.faults.processes import process_state, start_time

__all__ = ["aside_path", "own_token", "remove_left_files"]

_END = ".partial"


def aside_path(path: Path, token: str) -> Path:
    """Where a checkpoint is written before it takes its place; the token tells runs apart that write to one path.

    >>> aside_path(Path("run/step-3"), "a-1").name
    '.step-3.a-1.partial'
    """
    return path.with_name(f".{path.name}.{token}{_END}")


def own_token() -> str:
    """The token of a run whose rank 0 is this process: its machine and its id."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}-{os.getpid()}"


def remove_left_files(path: Path, keep_unknown: bool) -> None:
    """Remove what interrupted saves to this path have left: those of processes that are gone.

    Args:
        path: the path.
        keep_unknown: keep what processes of other machines are writing, or have left.
    """
    host = own_token().partition("-")[0]
    for found in path.parent.glob(f".{escape(path.name)}.*{_END}"):
        machine, _, process = found.name[len(path.name) + 2 : -len(_END)].partition("-")
        if machine == host and process.isdecimal():
            is_left = process_state(int(process), start_time(int(process))) == "gone"
        else:
            is_left = not keep_unknown
        if is_left:
            shutil.rmtree(found, ignore_errors=True)
