"""The state of processes of this machine: whether they run, are stopped, or are gone."""

from __future__ import annotations

import os

__all__ = ["process_state", "start_time"]


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 if that is unknown. It tells processes of one id apart."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def process_state(pid: int, started: int) -> str:
    """The state, "runs", "stopped" or "gone", of the process with this id and start time.

    >>> process_state(os.getpid(), start_time(os.getpid()))
    'runs'
    >>> process_state(os.getpid(), 1)
    'gone'
    """
    fields = _stat(pid)
    if not fields:
        if os.path.isdir("/proc/self"):
            return "gone"
        try:  # a system without /proc
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            return "runs"
        return "runs"
    if fields[0] in "ZX" or int(fields[19]) != started:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"
