"""The worker side of a worker process: joining the group, running tasks, answering, and exiting.

`worker_handle.py` is the side of the parent. The two are connected by a socket pair; a worker that finds the other end
closed exits, so no worker outlives its parent.
"""

import atexit
import io
import os
import pickle
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from shardwise.faults import FOLDER_VARIABLE, PeerError, current_session, guard

__all__ = ["Done", "Failed", "Job", "Stack", "WorkerConfig", "decode", "encode", "main", "main_of_fork"]

Job = tuple[Callable[..., object], tuple[object, ...]]

_CONNECTION_BROKE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|pair closure|connectfullmesh|"
    r"timed out waiting|socket timeout|wait timeout|failed to (recv|send)"
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker has to know before the first task."""

    rank: int
    nprocs: int
    folder: str
    parent: int
    argv: tuple[str, ...]
    main_file: str | None
    main_package: str | None


@dataclass(frozen=True, slots=True)
class Done:
    """The task returned. `clean`: the world group is the one that was joined first, and its connections hold."""

    rank: int
    value: bytes
    clean: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The task raised, or the process died. `peer`: the cause is the failure of another rank."""

    rank: int
    when: float
    kind: str
    what: str
    hint: str = ""
    traceback: str = ""
    peer: bool = False
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """The present stack of a worker, as text."""

    rank: int
    traceback: str


def encode(value: object) -> bytes:
    """A result as bytes, with its tensors by value: shared memory would go with the worker."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickling runs any object's own code
        raise TypeError(
            f"fn returned a value of type {type(value).__qualname__} that cannot be sent to the caller.\n"
            f"  why: {type(error).__name__}: {error}\n"
            "  fix: Return plain tensors or values (numbers, strings, tuples, lists, dicts) instead."
        ) from error
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The value that `encode` encoded."""
    return torch.load(io.BytesIO(data), weights_only=False)


def main() -> None:
    conn = Connection(int(sys.argv[1]))
    config: WorkerConfig = conn.recv()
    sys.argv[:] = config.argv
    # registered first, so it runs last: it skips the half second that Python takes to unload torch
    atexit.register(os._exit, 0)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    _serve(conn, config, lambda payload: _Unpickler(payload, config).load())


def main_of_fork(conn: Connection, inherited: Iterable[Connection], config: WorkerConfig, job: Job) -> None:
    torch.set_num_threads(1)  # before any op: OpenMP's threads do not survive a fork
    os.setsid()
    for other in inherited:
        other.close()
    _serve(conn, config, lambda _: job)


def _serve(conn: Connection, config: WorkerConfig, load: Callable[[bytes], Any]) -> None:
    """Join the group, then run tasks until the request to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # so that output is not lost when the worker is killed
    inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    lock = threading.Lock()
    threading.Thread(target=_listen, args=(conn, lock, config, inbox), daemon=True).start()
    world, request, payload = 0, "join", b""
    while request != "stop":
        answer: Done | Failed
        when = time.time()
        try:
            fn, args = (_join, (config,)) if request == "join" else load(payload)
            with guard():  # which may wait for the other ranks after an error
                try:
                    value = encode(fn(*args))
                finally:
                    when = time.time()
            # the id, because a reference would keep the connections of a destroyed group
            world = world or id(dist.group.WORLD)
            answer = Done(config.rank, value, clean=_is_intact(world))
        except BaseException as error:  # sys.exit() in fn, too, is an answer
            answer = _failure(config.rank, error, when, clean=_is_intact(world))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with lock:
            conn.send(answer)
        request, payload = inbox.get()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(config: WorkerConfig) -> None:
    for _, name in socket.if_nameindex():
        # local ranks need no other interface, whatever the name of the host resolves to
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ[FOLDER_VARIABLE] = config.folder  # which the parent removes
    store = dist.FileStore(os.path.join(config.folder, "store"), config.nprocs)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=config.rank, world_size=config.nprocs)


def _listen(
    conn: Connection, lock: threading.Lock, config: WorkerConfig, inbox: "queue.SimpleQueue[Any]"
) -> None:
    try:
        while True:
            while not conn.poll(1.0):
                # no end of file arrives while another fork of the parent has a copy of its end
                if os.getppid() != config.parent:
                    raise EOFError
            request, payload = conn.recv()
            if request == "where":
                with lock:
                    conn.send(Stack(config.rank, _stack()))
            else:
                inbox.put((request, payload))
    except (EOFError, OSError):
        shutil.rmtree(config.folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with the children of fn
        os._exit(1)


def _stack() -> str:
    """The stack of the main thread, starting at `fn`."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    start = max((i + 1 for i, frame in enumerate(stack) if frame.filename == __file__), default=0)
    return "".join(traceback.format_list(stack[start:]))


def _is_intact(world: int) -> bool:
    """Whether the world group still is the one with this id, and no fault broke it, not even one that the task caught."""
    session = current_session()
    return id(dist.group.WORLD) == world and (session is None or session.fault is None)


def _failure(rank: int, error: BaseException, when: float, clean: bool) -> Failed:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # starting at fn
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    links, link = [], error
    while link not in links and link is not None:
        links.append(link)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    told = any(isinstance(link, PeerError) for link in links)
    broke = any(isinstance(link, RuntimeError) and _CONNECTION_BROKE.search(str(link)) for link in links)
    hint = "why: Its connection to another rank broke or timed out.\n"
    hint += "fix: Let every rank call every collective before it destroys the group."
    kind = type(error).__qualname__
    return Failed(
        rank,
        when,
        kind,
        f"raised {line}",
        hint if broke and not told else "",
        text,
        broke or told,
        clean,
    )


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads the script of the parent when a job refers to it."""

    def __init__(self, payload: bytes, config: WorkerConfig) -> None:
        super().__init__(io.BytesIO(payload))
        self._config = config

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "__main__" and sys.modules["__main__"].__name__ != "__mp_main__":
            self._load_script()
        return super().find_class(module, name)

    def _load_script(self) -> None:
        # multiprocessing's name for it: the parent knows its script under both names, so that instances of its
        # classes can be sent back, and code under `if __name__ == "__main__":` does not run
        module = types.ModuleType("__mp_main__")
        module.__file__ = file = self._config.main_file or ""
        module.__package__ = self._config.main_package
        sys.modules["__mp_main__"] = module
        with io.open_code(file) as source:
            exec(compile(source.read(), file, "exec", dont_inherit=True), module.__dict__)
        sys.modules["__main__"] = module
