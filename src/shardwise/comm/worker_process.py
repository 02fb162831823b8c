"""One worker process: how it starts, what it runs, how it answers and how it ends.

`launch.py` makes teams of these. Parent and worker talk over one socket pair; a worker that finds the other
end closed ends itself, so no worker outlives its parent.
"""

import atexit
import contextlib
import inspect
import io
import multiprocessing
import os
import pickle
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Done",
    "Failed",
    "Job",
    "Seat",
    "Stuck",
    "Worker",
    "by_reference",
    "decode",
    "encode",
    "fork",
    "spawn",
]

Job = tuple[Callable[..., object], tuple[object, ...]]

_ANOTHER_RANK_BROKE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|pair closure|connectfullmesh|"
    r"timed out waiting|socket timeout|wait timeout|failed to (recv|send)"
)


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place in its team: what it has to know before the first task."""

    rank: int
    nprocs: int
    folder: str
    parent: int
    argv: tuple[str, ...]
    main_file: str | None
    main_package: str | None


@dataclass(frozen=True, slots=True)
class Done:
    """The task returned (the first one is to join the group); `clean`: the world group is as it was."""

    rank: int
    value: bytes
    clean: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The task raised, or the process died; `peer`: it only noticed the failure of another rank."""

    rank: int
    when: float
    kind: str
    what: str
    hint: str = ""
    traceback: str = ""
    peer: bool = False
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """Where the worker is now, as the text of its stack."""

    rank: int
    traceback: str


def encode(value: object) -> bytes:
    """A result as bytes that hold its tensors by value, so that they need nothing of the worker."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickling runs any object's own code
        raise TypeError(
            f"fn returned a value of type {type(value).__qualname__} that cannot be sent to the caller.\n"
            f"  why: {type(error).__name__}: {error}\n"
            "  fix: return plain tensors or values (numbers, strings, tuples, lists, dicts) instead"
        ) from error
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The value that `encode` wrote."""
    return torch.load(io.BytesIO(data), weights_only=False)


# ---- in the parent


class Worker:
    """The parent's handle of one worker process."""

    def __init__(self, rank: int, pid: int, conn: Connection, poll: Callable[[], int | None]) -> None:
        self.rank = rank
        self.pid = pid
        self.conn = conn
        self._poll = poll
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """The exit code once the process has ended, negative for a signal."""
        if self._code is None:
            self._code = self._poll()
            if self._code is not None:
                self._kill_group()  # at once: later the number may be another group's
        return self._code

    def wait(self, seconds: float) -> int | None:
        """The exit code, waiting up to `seconds` for it."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code

    def send(self, ask: str, payload: bytes = b"") -> None:
        """Ask for "run", "where" or "stop"; that a worker is gone is seen in `answer`."""
        with contextlib.suppress(OSError):
            self.conn.send((ask, payload))

    def answer(self) -> Done | Failed | Stuck | None:
        """What the worker said, or that it died, or None so far."""
        code = self.exit_code()  # before looking at the pipe: what it said before it ended counts
        try:
            if self.conn.poll():
                answer: Done | Failed | Stuck = self.conn.recv()
                return answer
        except (EOFError, OSError):
            if (code := self.wait(1.0)) is None:
                self.kill()
                code = self.wait(5.0)
        return None if code is None else _died(self.rank, code)

    def kill(self) -> None:
        """End the process and what it started."""
        if self.exit_code() is None:
            self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _died(rank: int, code: int) -> Failed:
    if code >= 0:
        what = f"ended with exit code {code} before it answered"
        hint = "why: something in it called os._exit, or it could not start; see its output"
    else:
        what = f"was killed by {signal.Signals(-code).name}"
        hint = "why: native code crashed\nfix: run with `python -X faulthandler` to see where"
        if -code in (signal.SIGKILL, signal.SIGTERM):
            hint = (
                "why: from outside, perhaps by the system for want of memory\nfix: if so, use fewer processes"
            )
    return Failed(rank, time.time(), "died", what, hint)


def spawn(seat: Seat) -> Worker:
    """Start a worker as a fresh interpreter with this one's `sys.path` and options."""
    here, there = multiprocessing.Pipe()
    # nothing but the built-in sys before the path is set: a file named like a standard module could be first
    code = "import sys; sys.path[:] = sys.argv[2:]; from shardwise.comm.worker_process import _main; _main()"
    options = ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]
    options += [f"-X{key}" if value is True else f"-X{key}={value}" for key, value in sys._xoptions.items()]
    with there:
        process = subprocess.Popen(
            [sys.executable, *options, "-c", code, str(there.fileno()), *map(str, sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
            start_new_session=True,  # its own group, so that `kill` reaches what fn starts
        )
    with contextlib.suppress(OSError):
        here.send(seat)
    return Worker(seat.rank, process.pid, here, process.poll)


def fork(seat: Seat, job: Job, siblings: Iterable[Worker]) -> Worker:
    """Start a worker as a copy of this process; `job` need not be importable."""
    here, there = multiprocessing.Pipe()
    inherited = [here, *(worker.conn for worker in siblings)]
    process = multiprocessing.get_context("fork").Process(target=_forked, args=(there, inherited, seat, job))
    with there, warnings.catch_warnings():
        # Python 3.12 warns when there are threads; torch's own, the usual ones, are dealt with in `_forked`
        warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)
        process.start()
    return Worker(seat.rank, process.pid or 0, here, lambda: process.exitcode)


def by_reference(job: Job) -> tuple[bytes | None, str]:
    """The job as bytes that a fresh process can load, or None and what is in the way."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(job)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return (None, pickler.obstacle) if pickler.obstacle else (buffer.getvalue(), "")


class _Pickler(pickle.Pickler):
    """Pickles, and notes a function or class that a fresh process could not import."""

    obstacle = ""

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, type | types.FunctionType):
            module = obj.__module__ or ""
            if not (_in_script(obj) if module == "__main__" else _findable(module.partition(".")[0])):
                self.obstacle = f"{module}.{obj.__qualname__} is not in a file that they can import"
        return NotImplemented


def _in_script(obj: Any) -> bool:
    """Whether something of `__main__` is in a script's file, and not typed into a notebook or at a prompt."""
    files = [getattr(sys.modules["__main__"], "__file__", None) or ""]
    if isinstance(obj, types.FunctionType):
        files.append(inspect.unwrap(obj).__code__.co_filename)
    return all(os.path.isfile(file) for file in files)


def _findable(module: str) -> bool:
    """Whether a module is found by looking for it, and not only because it is loaded already."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(module, None) is not None for finder in finders)


# ---- in the worker


def _main() -> None:
    conn = Connection(int(sys.argv[1]))
    seat: Seat = conn.recv()
    sys.argv[:] = seat.argv
    # first registered, so last to run: it saves the half second that Python takes to dismantle torch
    atexit.register(os._exit, 0)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    _serve(conn, seat, lambda payload: _Unpickler(payload, seat).load())


def _forked(conn: Connection, inherited: Iterable[Connection], seat: Seat, job: Job) -> None:
    torch.set_num_threads(1)  # before any op: OpenMP's threads do not survive a fork
    os.setsid()
    for other in inherited:
        other.close()
    _serve(conn, seat, lambda _: job)


def _serve(conn: Connection, seat: Seat, load: Callable[[bytes], Any]) -> None:
    """Join the group, then answer tasks until told to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a worker that is killed must not lose what it printed
    inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    lock = threading.Lock()
    threading.Thread(target=_listen, args=(conn, lock, seat, inbox), daemon=True).start()
    world, ask, payload = 0, "join", b""
    while ask != "stop":
        answer: Done | Failed
        try:
            fn, args = (_join, (seat,)) if ask == "join" else load(payload)
            value = encode(fn(*args))
            world = world or id(dist.group.WORLD)  # a reference would keep its connections open if fn ends it
            answer = Done(seat.rank, value, clean=id(dist.group.WORLD) == world)
        except BaseException as error:  # sys.exit() in fn is an answer too
            answer = _raised(seat.rank, error, clean=id(dist.group.WORLD) == world)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with lock:
            conn.send(answer)
        ask, payload = inbox.get()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(seat: Seat) -> None:
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # whatever the host's name resolves to, local ranks need no other interface
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store = dist.FileStore(os.path.join(seat.folder, "store"), seat.nprocs)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.nprocs)


def _listen(conn: Connection, lock: threading.Lock, seat: Seat, inbox: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            while not conn.poll(1.0):
                # a process that the parent forked may hold a copy of its end and keep the end of file away
                if os.getppid() != seat.parent:
                    raise EOFError
            ask, payload = conn.recv()
            if ask == "where":
                with lock:
                    conn.send(Stuck(seat.rank, _stack()))
            else:
                inbox.put((ask, payload))
    except (EOFError, OSError):
        shutil.rmtree(seat.folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with whatever fn started
        os._exit(1)


def _stack() -> str:
    """The main thread's stack, from `fn` on."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    start = max((i + 1 for i, frame in enumerate(stack) if frame.filename == __file__), default=0)
    return "".join(traceback.format_list(stack[start:]))


def _raised(rank: int, error: BaseException, clean: bool) -> Failed:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # from fn on
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    links, link = [], error
    while link not in links and link is not None:
        links.append(link)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    peer = any(isinstance(link, RuntimeError) and _ANOTHER_RANK_BROKE.search(str(link)) for link in links)
    hint = "why: its connection to another rank broke or stayed silent\n"
    hint += "fix: let every rank take part in every collective, and keep the group until then"
    kind = type(error).__qualname__
    return Failed(rank, time.time(), kind, f"raised {line}", hint if peer else "", text, peer, clean)


class _Unpickler(pickle.Unpickler):
    """Loads a job, and the parent's script when the job names something in it."""

    def __init__(self, payload: bytes, seat: Seat) -> None:
        super().__init__(io.BytesIO(payload))
        self._seat = seat

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "__main__" and sys.modules["__main__"].__name__ != "__mp_main__":
            self._load_script()
        return super().find_class(module, name)

    def _load_script(self) -> None:
        # multiprocessing's name for it: the parent knows its script under both names, so that instances of
        # the script's classes can be sent back, and `if __name__ == "__main__"` guards as people expect
        module = types.ModuleType("__mp_main__")
        module.__file__ = file = self._seat.main_file or ""
        module.__package__ = self._seat.main_package
        sys.modules["__mp_main__"] = module
        with io.open_code(file) as source:
            exec(compile(source.read(), file, "exec", dont_inherit=True), module.__dict__)
        sys.modules["__main__"] = module
