"""The parent side of a worker process: starting it, sending it requests, reading its answers, and killing it."""

import contextlib
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from shardwise.comm.worker_process import Done, Failed, Job, Stack, WorkerConfig, main_of_fork

__all__ = ["Worker", "encode_job", "fork", "spawn"]


class Worker:
    """The parent's handle to one worker process."""

    def __init__(self, rank: int, pid: int, conn: Connection, poll: Callable[[], int | None]) -> None:
        self.rank = rank
        self.pid = pid
        self.conn = conn
        self._poll = poll
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        if self._code is None:
            self._code = self._poll()
            if self._code is not None:
                self._kill_group()  # now: later the id may belong to another group
        return self._code

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if the process still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code

    def send(self, request: str, payload: bytes = b"") -> None:
        """Send a request: "run", "where" or "stop". If the worker has died, `answer` reports it."""
        with contextlib.suppress(OSError):
            self.conn.send((request, payload))

    def answer(self) -> Done | Failed | Stack | None:
        """The answer of the worker, or that it died, or None if there is no answer yet."""
        code = self.exit_code()  # before reading the pipe: an answer sent before the exit counts
        try:
            if self.conn.poll():
                answer: Done | Failed | Stack = self.conn.recv()
                return answer
        except (EOFError, OSError):
            if (code := self.wait(1.0)) is None:
                self.kill()
                code = self.wait(5.0)
        return None if code is None else _death(self.rank, code)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.exit_code() is None:
            self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _death(rank: int, code: int) -> Failed:
    if code >= 0:
        what = f"ended with exit code {code} before it answered"
        hint = "why: It called os._exit, or it could not start.\nfix: See its output above."
    else:
        what = f"was killed by {signal.Signals(-code).name}"
        hint = "why: Native code crashed.\nfix: Run with `python -X faulthandler` to see the stack."
        if -code in (signal.SIGKILL, signal.SIGTERM):
            hint = (
                "why: Another process did it, perhaps the system when memory ran out.\n"
                "fix: If memory ran out, use fewer processes."
            )
    return Failed(rank, time.time(), "died", what, hint)


def spawn(config: WorkerConfig) -> Worker:
    """Start a worker as a new interpreter with the `sys.path` and options of this one."""
    here, there = multiprocessing.Pipe()
    # only sys may be imported before the path is set: the working directory may have a file named like a module
    code = "import sys; sys.path[:] = sys.argv[2:]; from shardwise.comm.worker_process import main; main()"
    options = ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]
    options += [f"-X{key}" if value is True else f"-X{key}={value}" for key, value in sys._xoptions.items()]
    # one hash seed for all ranks: a loop over a set of names must create tensors in the same order everywhere
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    if environment["PYTHONHASHSEED"] == "random":
        environment["PYTHONHASHSEED"] = "0"
    with there:
        process = subprocess.Popen(
            [sys.executable, *options, "-c", code, str(there.fileno()), *map(str, sys.path)],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(there.fileno(),),
            start_new_session=True,  # its own process group, so that `kill` reaches the children of fn
        )
    with contextlib.suppress(OSError):
        here.send(config)
    return Worker(config.rank, process.pid, here, process.poll)


def fork(config: WorkerConfig, job: Job, siblings: Iterable[Worker]) -> Worker:
    """Start a worker as a fork of this process, for a job that cannot be imported."""
    here, there = multiprocessing.Pipe()
    inherited = [here, *(worker.conn for worker in siblings)]
    process = multiprocessing.get_context("fork").Process(
        target=main_of_fork, args=(there, inherited, config, job)
    )
    with there, warnings.catch_warnings():
        # Python 3.12 warns if there are threads; `main_of_fork` takes care of those of torch
        warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)
        process.start()
    return Worker(config.rank, process.pid or 0, here, lambda: process.exitcode)


def encode_job(job: Job) -> tuple[bytes | None, str]:
    """The job as bytes that a new process can load, or None and the obstacle."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(job)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return (None, pickler.obstacle) if pickler.obstacle else (buffer.getvalue(), "")


class _Pickler(pickle.Pickler):
    """A pickler that notes a function or class that a new process could not import."""

    obstacle = ""

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, type | types.FunctionType):
            module = obj.__module__ or ""
            if not (_is_in_script(obj) if module == "__main__" else _is_importable(module.partition(".")[0])):
                self.obstacle = f"{module}.{obj.__qualname__} is not in a file that they can import"
        return NotImplemented


def _is_in_script(obj: Any) -> bool:
    """Whether an object of `__main__` is in the file of a script, not typed in a notebook or at a prompt."""
    files = [getattr(sys.modules["__main__"], "__file__", None) or ""]
    if isinstance(obj, types.FunctionType):
        files.append(inspect.unwrap(obj).__code__.co_filename)
    return all(os.path.isfile(file) for file in files)


def _is_importable(module: str) -> bool:
    """Whether a module can be imported by a process that has not loaded it."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(module, None) is not None for finder in finders)
