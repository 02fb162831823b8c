"""A world of forked processes for each fault: starting one takes a tenth of a second, since torch is imported already."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["RankOutcome", "WorldOutcome", "run_world"]


class RankOutcome(NamedTuple):
    """How one rank ended: "returned", "raised", "died", or "hung" if it had to be killed.

    `seconds` since the fault was injected, or since the start if it was not.
    """

    end: str
    error: str
    text: str
    seconds: float


class WorldOutcome(NamedTuple):
    """The outcomes by rank, and whether the fault was injected at all."""

    ranks: dict[int, RankOutcome]
    injected: bool


def run_world(
    program: Callable[[Callable[[], None]], Any],
    nprocs: int,
    limit: float,
    expendable: frozenset[int] = frozenset(),
) -> WorldOutcome:
    """Run `program(injected)` on forked processes that form a gloo group; it calls `injected()` when the fault happens.

    Args:
        limit: the seconds after which ranks that still run have hung, from the injection of the fault; three times that
            from the start.
        expendable: ranks that are not waited for once all others have ended.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = {rank: _fork(program, rank, nprocs, folder) for rank in range(nprocs)}
        codes = _wait(pids, folder, limit, expendable)
        when = _read(folder / "injected")
        start = float((folder / "start").read_text()) if (folder / "start").exists() else 0.0
        found = {rank: _outcome(folder, rank, codes[rank], when or start) for rank in pids}
        return WorldOutcome(found, when is not None)


def _fork(program: Callable[[Callable[[], None]], Any], rank: int, nprocs: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    end: tuple[str, str, str] = ("raised", "", "")
    try:
        os.setsid()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        store = dist.FileStore(str(folder / "store"), nprocs)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs)
        dist.barrier()
        _write(folder / "start", f"{time.monotonic()}")
        value = program(lambda: _write(folder / "injected", f"{time.monotonic()}"))
        end = ("returned", "", repr(value))
    except BaseException as error:
        end = ("raised", type(error).__name__, str(error) or traceback.format_exc(limit=-1))
    finally:
        _write(folder / f"rank{rank}", json.dumps([*end, time.monotonic()]))
        # others may still need the connections for a moment, as in a program that prints its traceback before it ends
        time.sleep(0.3)
        os._exit(0)


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


def _read(path: Path) -> float | None:
    return float(path.read_text()) if path.exists() else None


def _wait(
    pids: dict[int, int], folder: Path, limit: float, expendable: frozenset[int]
) -> dict[int, int | None]:
    """The exit codes of the ranks; None for those that had to be killed."""
    codes: dict[int, int | None] = {}
    start = time.monotonic()
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(done[1])
        since = _read(folder / "injected")
        late = time.monotonic() - since > limit if since is not None else time.monotonic() - start > 3 * limit
        if pids.keys() - codes.keys() <= expendable:
            time.sleep(0.2)  # for those of them that have something to tell
            late = True
        if late:
            for rank, pid in pids.items():
                if rank not in codes:  # also one that is stopped
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = None
        time.sleep(0.01)
    return codes


def _outcome(folder: Path, rank: int, code: int | None, since: float) -> RankOutcome:
    file = folder / f"rank{rank}"
    if file.exists():
        end, error, text, when = json.loads(file.read_text())
        return RankOutcome(end, error, text, when - since)
    if code is None:
        return RankOutcome("hung", "", "", 0.0)
    return RankOutcome("died", "", f"exit code {code}", 0.0)
