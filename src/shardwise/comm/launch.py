"""Running functions on local processes: `launch` runs one, `Workers` run many on the same processes."""

import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.worker_handle import Worker, encode_job, fork, spawn
from shardwise.comm.worker_process import Done, Failed, Job, Stack, WorkerConfig, decode, encode
from shardwise.faults import guard
from shardwise.torch_internals.connections import init_from_environment

__all__ = ["LaunchError", "Workers", "launch", "launch_survivors"]

T = TypeVar("T")
_Answers = dict[int, Done | Failed | Stack]

_START_SECONDS = 300.0  # for all ranks to import torch and join the group, on a loaded machine
_DRAIN_SECONDS = 2.0  # for the other ranks to answer after one has raised
_DRAIN_SECONDS_AFTER_DEATH = 0.3  # the same after one has died: they can only report the broken connection
_LOST_KINDS = ("died", "LeftBehindError")  # of ranks that others can go on without
_SHUTDOWN_SECONDS = 5.0  # for a worker to exit by itself


class LaunchError(RuntimeError):
    """A rank failed: `rank` is the first one that did, `traceback` the text of its traceback."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message, rank, traceback)
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


def launch(fn: Callable[..., T], nprocs: int, *args: object, timeout: float | None = None) -> list[T]:
    """Run `fn(*args)` on `nprocs` local processes that form a gloo group, and return the results by rank.

        def total(x):
            dist.all_reduce(x)
            return x

        if __name__ == "__main__":
            launch(total, 4, torch.ones(2))  # [tensor([4., 4.])] * 4

    Under `torchrun`, which has started the processes, `fn` runs in this one, and each rank gets all results.

    Args:
        fn: the function. If new processes can import it, and its arguments can be pickled, they are new interpreters;
            otherwise they are forks of this process.
        nprocs: the number of processes, at least 1; under `torchrun`, the number that it has started.
        *args: the arguments of `fn`, the same on every rank.
        timeout: seconds for `fn` to return on all ranks, or None for no limit.

    Returns:
        What `fn` returned on each rank, by rank; tensors by value.

    Raises:
        LaunchError: `fn` raised on a rank, a rank died, or `timeout` has passed.
        RuntimeError: this process is already part of a process group.
        TypeError: an argument is of the wrong type.
        ValueError: `nprocs` or `timeout` is out of range.

    The processes connect to each other once; apart from that only `fn` communicates.
    """
    _check(fn, nprocs, timeout)
    if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _run_here(fn, nprocs, args, timeout)
    if dist.is_initialized():
        raise RuntimeError(
            "launch was called in a process that is already part of a process group.\n"
            "  why: launch starts its own processes, which form their own group.\n"
            "  fix: Inside a function that launch runs, use the existing group; in a script, call launch\n"
            '       under `if __name__ == "__main__":`, since the workers import the script.'
        )
    task, _ = encode_job((fn, args))
    team = _Team(nprocs, job=(fn, args) if task is None else None)
    try:
        return team.run(task or b"", timeout)
    finally:
        team.stop()


def launch_survivors(fn: Callable[..., tuple[Iterable[int], T]], nprocs: int, *args: object) -> dict[int, T]:
    """Run `fn(*args)` on local processes like `launch`, of which some may die: return the results of the others by rank.

    Args:
        fn: returns the ranks that have finished together, and its result. Others are not waited for.
        nprocs: the number of processes.
        *args: the arguments of `fn`.

    Raises:
        LaunchError: `fn` raised on a rank, or all processes died.
    """
    _check(args[0] if args else fn, nprocs, None)
    task, _ = encode_job((fn, args))
    team = _Team(nprocs, job=(fn, args) if task is None else None)
    try:
        return team.run_survivors(task or b"")
    finally:
        team.stop()


class Workers:
    """Processes that form a gloo group and run many functions: `with Workers(4) as workers: workers.run(fn, x)`.

    They start at construction. After a run that left them in an unknown state, the next run starts new ones.

    Args:
        timeout: seconds for each run, or None for no limit.
    """

    def __init__(self, nprocs: int, timeout: float | None = None) -> None:
        _check(_Team, nprocs, timeout)
        self._nprocs = nprocs
        self._timeout = timeout
        self._lock = threading.Lock()
        self._closed = False
        self._team = _Team(nprocs)

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Run `fn(*args)` on every rank, and return the results by rank."""
        _check(fn, self._nprocs, self._timeout)
        task, obstacle = encode_job((fn, args))
        if task is None:
            raise TypeError(
                f"Workers cannot run {getattr(fn, '__qualname__', fn)} with these arguments.\n"
                f"  why: The workers are new processes that import what they run; {obstacle}.\n"
                "  fix: Define it at module level and pass plain values, or use launch, which can fork."
            )
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    "Workers.run was called after close.\n"
                    "  why: The processes have been stopped.\n"
                    "  fix: Call run inside the `with Workers(…)` block."
                )
            if not self._team.is_usable():
                self._team.stop()
                self._team = _Team(self._nprocs)
            return self._team.run(task, self._timeout)

    def close(self) -> None:
        """Stop the processes."""
        with self._lock:
            self._closed = True
            self._team.stop()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Team:
    """The processes of one start: new interpreters, or forks of this process if they are to run one job."""

    def __init__(self, nprocs: int, job: Job | None = None) -> None:
        self._workers: list[Worker] = []
        self._joined = False
        self._broken = False
        folder = tempfile.mkdtemp(prefix="shardwise-")
        self._finish = weakref.finalize(self, _finish, self._workers, folder, os.getpid())
        main = sys.modules.get("__main__")
        file, package = getattr(main, "__file__", None), getattr(main, "__package__", None)
        try:
            for rank in range(nprocs):
                config = WorkerConfig(rank, nprocs, folder, os.getpid(), tuple(sys.argv), file, package)
                self._workers.append(spawn(config) if job is None else fork(config, job, self._workers))
        except BaseException:
            self.stop()
            raise

    def is_usable(self) -> bool:
        return not self._broken and all(worker.exit_code() is None for worker in self._workers)

    def run_survivors(self, task: bytes) -> dict[int, Any]:
        """Run a task until the ranks that its results name have returned; the results by rank."""
        self._collect(_START_SECONDS)
        self._joined = self._broken = True  # whatever happens: the ranks are not used again
        for worker in self._workers:
            worker.send("run", task)
        answers: _Answers = {}
        awaited = {worker.rank for worker in self._workers}
        while awaited - answers.keys():
            waiting = [worker for worker in self._workers if worker.rank in awaited - answers.keys()]
            wait([worker.conn for worker in waiting], timeout=0.2)
            for worker in waiting:
                if (answer := worker.answer()) is not None:
                    answers[worker.rank] = answer
                    if isinstance(answer, Done):
                        awaited &= set(decode(answer.value)[0])
                    elif isinstance(answer, Failed) and answer.kind not in _LOST_KINDS:
                        self._drain(answers)
                        awaited.clear()
        failures = [answer for answer in answers.values() if isinstance(answer, Failed)]
        raised = [failure for failure in failures if failure.kind not in _LOST_KINDS]
        found = {rank: decode(a.value)[1] for rank, a in sorted(answers.items()) if isinstance(a, Done)}
        if raised or not found:
            raise _failure(raised or failures, answers, len(self._workers))
        return found

    def _drain(self, answers: _Answers) -> None:
        """Collect what the other ranks say, shortly after one has raised."""
        end = time.monotonic() + _DRAIN_SECONDS
        while len(answers) < len(self._workers) and time.monotonic() < end:
            for worker in self._workers:
                if worker.rank not in answers and (answer := worker.answer()) is not None:
                    answers[worker.rank] = answer
            time.sleep(0.01)

    def run(self, task: bytes, timeout: float | None) -> list[Any]:
        """Run a task and return the results by rank. A failure that leaves the state of ranks unknown stops them."""
        try:
            if not self._joined:  # not within the timeout of the task: importing torch takes long
                self._collect(_START_SECONDS)
                self._joined = True
            for worker in self._workers:
                worker.send("run", task)
            answers = self._collect(timeout)
        except BaseException as error:
            if self._broken or not isinstance(error, LaunchError):
                self._broken = True
                self.stop()
            raise
        self._broken = not all(answer.clean for answer in answers)
        return [decode(answer.value) for answer in answers]

    def _collect(self, limit: float | None) -> list[Done]:
        """The answers of all ranks to one request, by rank."""
        answers: _Answers = {}
        deadline = float("inf") if limit is None else time.monotonic() + limit
        while len(answers) < len(self._workers) and (left := deadline - time.monotonic()) > 0:
            waiting = [worker for worker in self._workers if worker.rank not in answers]
            wait([worker.conn for worker in waiting], timeout=min(left, 0.2))
            for worker in waiting:
                if (answer := worker.answer()) is None:
                    continue
                answers[worker.rank] = answer
                if isinstance(answer, Failed):
                    drain = _DRAIN_SECONDS_AFTER_DEATH if answer.kind == "died" else _DRAIN_SECONDS
                    deadline = min(deadline, time.monotonic() + drain)
        failures = [answer for answer in answers.values() if isinstance(answer, Failed)]
        if failures:
            # if only some ranks raised, the others may be in the middle of a collective
            clean = all(failure.clean and not failure.peer for failure in failures)
            same = len(failures) == len(self._workers) and len({failure.kind for failure in failures}) == 1
            self._broken = not (clean and same)
            raise _failure(failures, answers, len(self._workers))
        missing = [worker for worker in self._workers if worker.rank not in answers]
        if missing:
            self._broken = True
            raise _timeout(missing, len(self._workers), limit or 0.0)
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, Done)]

    def stop(self) -> None:
        if self._broken or not self._joined:  # such workers may not respond to a request to stop
            for worker in self._workers:
                worker.kill()
        self._finish()


def _finish(workers: list[Worker], folder: str, owner: int) -> None:
    if os.getpid() != owner:  # a fork has copies of the handles, and must not use them
        return
    for worker in workers:
        worker.send("stop")
    deadline = time.monotonic() + _SHUTDOWN_SECONDS
    for worker in workers:
        if worker.wait(deadline - time.monotonic()) is None:
            worker.kill()
            worker.wait(_SHUTDOWN_SECONDS)
        worker.conn.close()
    shutil.rmtree(folder, ignore_errors=True)


def _failure(failures: list[Failed], answers: _Answers, nprocs: int) -> LaunchError:
    """The error that names the rank that failed first, not one whose connection to it broke."""
    all_failed = len(failures) == nprocs > 1 and len({failure.what for failure in failures}) == 1
    first = min(
        failures, key=lambda failure: (failure.peer, 0.0 if all_failed else failure.when, failure.rank)
    )
    others = sorted(failure.rank for failure in failures if failure is not first)
    silent = [rank for rank in range(nprocs) if rank not in answers]
    notes = [first.hint] if first.hint else []
    if others:
        notes.append("so did every other rank" if all_failed else f"then failed: {_ranks(others)}")
    if silent:
        notes.append(f"stopped before the end: {_ranks(silent)}")
    if first.traceback:
        notes.append(f"traceback of rank {first.rank}:\n{textwrap.indent(first.traceback, '  ')}")
    what = f"rank {first.rank} of {nprocs} {first.what}\n"
    return LaunchError(what + textwrap.indent("\n".join(notes), "  "), first.rank, first.traceback)


def _timeout(missing: list[Worker], nprocs: int, limit: float) -> LaunchError:
    """The error for ranks that did not answer in time, with their stacks."""
    stacks = ""
    for worker in missing:
        worker.send("where")
    for worker in missing:
        wait([worker.conn], timeout=0.5)
        if isinstance(answer := worker.answer(), Stack):
            stacks += f"rank {worker.rank} was at:\n{answer.traceback}"
    message = (
        f"{_ranks(worker.rank for worker in missing)} of {nprocs} did not finish within {limit:g} s.\n"
        "  why: The function takes longer, or a rank waits in a collective that another rank did not call.\n"
        "  fix: Let every rank call every collective (the stacks are below), or pass a longer timeout.\n"
    )
    return LaunchError(message + textwrap.indent(stacks, "  "), missing[0].rank, stacks)


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _check(fn: object, nprocs: object, timeout: float | None) -> None:
    if not callable(fn):
        raise TypeError(
            f"fn is {fn!r}, of type {type(fn).__name__}.\n"
            "  why: It must be callable, since every rank calls it.\n"
            "  fix: Pass the function itself: launch(fn, 4, x), not launch(fn(x), 4)."
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        raise TypeError(
            f"nprocs is {nprocs!r}, of type {type(nprocs).__name__}.\n"
            "  why: It is the number of processes to start.\n"
            "  fix: Pass an int: launch(fn, 4, x)."
        )
    if nprocs < 1:
        raise ValueError(
            f"nprocs is {nprocs}.\n  why: fn needs at least one process.\n  fix: launch(fn, 1, x), or more"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(
            f"timeout is {timeout}.\n"
            "  why: It is the number of seconds that fn may take.\n"
            "  fix: Pass a number above 0, or None for no limit."
        )


def _run_here(fn: Callable[..., T], nprocs: int, args: tuple[object, ...], timeout: float | None) -> list[T]:
    """`launch` in a process that torchrun has started."""
    world = int(os.environ["WORLD_SIZE"])
    if nprocs != world:
        raise ValueError(
            f"nprocs is {nprocs}, but torchrun has started {world} process{'es' if world != 1 else ''}.\n"
            "  why: under torchrun (RANK, WORLD_SIZE and MASTER_ADDR are set) launch starts no processes.\n"
            f"  fix: torchrun --nproc-per-node {nprocs}, or launch(fn, {world}); without torchrun, unset these"
        )
    own = not dist.is_initialized()
    if own:
        init_from_environment("gloo", None if timeout is None else timedelta(seconds=timeout))
    rank = dist.get_rank()
    try:
        try:
            with guard():
                value = encode(fn(*args))
        except Exception as error:
            what = "".join(traceback.format_exception_only(error)).strip()
            raise LaunchError(
                f"rank {rank} of {world} raised {what}", rank, traceback.format_exc()
            ) from error
        values: list[bytes] = [b""] * world
        dist.all_gather_object(values, value)
        return [decode(data) for data in values]
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
