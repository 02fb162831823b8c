"""The ranks tell rank 0 how they fared, and rank 0 tells all of them the outcome: through the store, without collectives.

A background thread may do it while the program communicates. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.aside import own_token
from shardwise.checkpoint.errors import ERRORS, CheckpointError
from shardwise.checkpoint.save_plan import this_rank, world_size
from shardwise.comm import is_simulated
from shardwise.faults import PeerError, current_session, watch_world
from shardwise.torch_internals.collectives import note_of
from shardwise.torch_internals.connections import world_store

__all__ = ["Report", "agree", "next_number", "restart_numbers", "run_token"]

Report = dict[str, Any]
_numbers = [itertools.count()]
_KEPT_VERDICTS = 16
_BACKGROUND_SECONDS = 1.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02


def next_number(what: str) -> int:
    """The number of an exchange, which is the same on all ranks because they save and load in the same order.

    Args:
        what: the function that the program called. It counts as a collective, so that ranks that call others are found.
    """
    session, world = None if is_simulated() else watch_world(), dist.group.WORLD
    if session is not None and world is not None:
        session.begin(world.group_name, note_of(f"checkpoint.{what}"))
    return next(_numbers[0])


def restart_numbers() -> None:
    """Begin to count anew, in a new world with a new store, whose ranks may have counted differently before."""
    _numbers[0] = itertools.count()


def agree(
    number: int,
    work: Callable[[], Report],
    decide: Callable[[Sequence[Report]], Report],
    timeout: float,
    alone: bool,
) -> Report:
    """Do the work of this rank, and return what `decide` returns on rank 0, given the reports of all ranks; on every rank.

    Args:
        number: of `next_number`.
        work: called here; returns the report of this rank.
        decide: called on rank 0, if all ranks have done their work.
        timeout: seconds to wait for the other ranks.
        alone: there are no other processes.

    Raises:
        CheckpointError: `work` raised on a rank, `decide` raised, or a rank did not report within `timeout` seconds. It is the
            same on all ranks; the error of this rank itself is its cause.
    """
    try:
        report = work()
    except Exception as error:
        try:
            _exchange(number, _failure(error, None if alone else this_rank()), decide, timeout, alone)
        except CheckpointError as verdict:
            raise verdict from error.__cause__ if isinstance(error, CheckpointError) else error
        raise
    return _exchange(number, report, decide, timeout, alone)


def _exchange(
    number: int, report: Report, decide: Callable[[Sequence[Report]], Report], timeout: float, alone: bool
) -> Report:
    """The outcome, or the error that a rank reported under the key "error"."""
    if alone:
        return _raise_error(_decide([report], decide))
    store, prefix = world_store(), f"shardwise/checkpoint/{number}"
    if this_rank() != 0:
        store.set(f"{prefix}/{this_rank()}", json.dumps(report))
        return _raise_error(json.loads(_wait(store, f"{prefix}/verdict", timeout, "rank 0")))
    reports = [report]
    for rank in range(1, world_size()):
        key = f"{prefix}/{rank}"
        try:
            reports.append(json.loads(_wait(store, key, timeout, f"rank {rank}")))
            store.delete_key(key)
        except CheckpointError as error:
            reports.append(_failure(error, rank))
            break
    try:
        verdict = _decide(reports, decide)
    except Exception as error:
        store.set(f"{prefix}/verdict", json.dumps(_failure(error, 0)))
        raise
    store.set(f"{prefix}/verdict", json.dumps(verdict))
    store.delete_key(f"shardwise/checkpoint/{number - _KEPT_VERDICTS}/verdict")
    return _raise_error(verdict)


def run_token(timeout: float, alone: bool) -> str:
    """What tells the files that this run writes aside from those of other runs: the token of rank 0, on all ranks."""
    own = own_token()
    if alone:
        return own
    store, key = world_store(), "shardwise/checkpoint/token"
    if this_rank() == 0:
        store.set(key, own)
        return own
    return _wait(store, key, timeout, "rank 0").decode()


def _failure(error: Exception, rank: int | None = None) -> Report:
    """An error as a report, with the rank that it happened on."""
    if not isinstance(error, CheckpointError):
        error = CheckpointError(
            f"{type(error).__name__}: {error}",
            why="The checkpoint could not be written or read on this rank.",
            fix="See the traceback of that rank.",
        )
    what = error.what if rank is None else f"[rank {rank}] {error.what}"
    return {"error": type(error).__name__, "what": what, "why": error.why, "fix": error.fix}


def _decide(reports: Sequence[Report], decide: Callable[[Sequence[Report]], Report]) -> Report:
    failed = [r for r in reports if "error" in r]
    if failed:
        others = len(failed) - 1
        return {**failed[0], "what": failed[0]["what"] + (f" ({others} more ranks failed)" if others else "")}
    try:
        return decide(reports)
    except CheckpointError as error:
        return _failure(error)


def _raise_error(verdict: Report) -> Report:
    if "error" in verdict:
        kind = ERRORS.get(verdict["error"], CheckpointError)
        raise kind(verdict["what"], why=verdict["why"], fix=verdict["fix"])
    return verdict


def _wait(store: Any, key: str, timeout: float, who: str) -> bytes:
    """The value of a key, polled: a blocking wait would keep other threads from the store."""
    session = current_session()
    with nullcontext() if session is None else session.patient_wait():
        try:
            return _poll(store, key, timeout, who)
        except PeerError:
            raise
        except RuntimeError as error:  # the store is gone with the rank that served it
            if (
                session is None
                or isinstance(error, CheckpointError)
                or (found := session.explain(error)) is None
            ):
                raise
            raise found from error


def _poll(store: Any, key: str, timeout: float, who: str) -> bytes:
    start, world = time.monotonic(), dist.group.WORLD
    end = start + timeout
    in_background = threading.current_thread() is not threading.main_thread()
    told = 0.0
    while not store.check([key]):
        if dist.group.WORLD is not world:
            raise CheckpointError(
                f"The process group was destroyed before {who} answered.",
                why="The ranks tell each other the outcome through its store.",
                fix="Call wait() before destroy_process_group().",
            )
        if time.monotonic() > end:
            raise CheckpointError(
                f"{who} did not answer for {timeout:g} s.",
                why="It has died, or it is not saving or loading a checkpoint as the other ranks are.",
                fix="Call save, async_save and load on all ranks, in the same order; see the output of that rank.",
            )
        if (session := current_session()) is not None and session.fault is not None:
            told = told or time.monotonic()
            # a rank whose program has failed may still complete what it writes in the background
            if not in_background or time.monotonic() - told > _BACKGROUND_SECONDS:
                session.raise_fault()
        # in proportion to the time that has passed, so that little of it is added
        time.sleep(min(max((time.monotonic() - start) / 16, _SHORTEST_PAUSE), _LONGEST_PAUSE))
    return store.get(key)  # type: ignore[no-any-return]
