"""The connections and the store of this process's world: joining it, and breaking connections, so that no thread waits on them."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

__all__ = [
    "break_connections",
    "break_store_connection",
    "init_from_environment",
    "launch_token",
    "reset_collective_timeout",
    "settle_threads",
    "world_store",
]

_HIDDEN_SECONDS = 0.1


def world_store() -> Any:
    """The store through which the ranks of the world found each other, without what they wrote before torchrun restarted them.

    torchrun keeps the store when it restarts the ranks (torch 2.13), so that they would read the answers of their predecessors.
    """
    store = distributed_c10d._get_default_store()
    return PrefixStore(f"attempt{attempt}", store) if (attempt := _restarts()) else store


def init_from_environment(backend: str, timeout: timedelta | None = None) -> None:
    """`init_process_group` by the variables that a launcher has set; after a restart by torchrun, too.

    The addresses of ranks that are gone are still in torchrun's store then: gloo would connect to them, and fail or wait.
    """
    attempt = _restarts()
    if not attempt:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"attempt{attempt}", TCPStore(host, port, size, is_master=serves))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _restarts() -> int:
    """How often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launch_token(own: str) -> str | None:
    """A text that all ranks of one start of torchrun share, also after it has restarted them: the `own` of the first that asked.

    It is in the store of torchrun's agent; None if the ranks have a store of their own, which ends with them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(store.compare_set("shardwise/launch", "", own).decode())


def reset_collective_timeout() -> None:
    """Give the collectives of the world torch's default timeout, where it was created with a shorter one to connect."""
    # public since torch 2.14
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(distributed_c10d.default_pg_timeout)


def break_connections() -> int:
    """Break the connections of all process groups of this process, and return the number of broken sockets.

    Every wait for a collective, here and on the ranks at the other ends, ends within milliseconds with an error. Neither
    `abort()` nor `destroy_process_group()` does this for gloo. The groups cannot be used afterwards.
    """
    broken = sum(_shut_down(fd) for fd in _gloo_sockets())
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in str(dist.get_backend(group)) and hasattr(group, "abort"):
            group.abort()
    return broken


def settle_threads(limit: float = 0.2) -> None:
    """Wait until the threads that run gloo's collectives have nothing to do, before the interpreter ends.

    A thread releases the tensors of a collective a moment after it is over, and needs Python for that. If the interpreter has begun to
    end, this ends the process by SIGABRT, also of a program that has finished. Destroying the groups does not end the threads:
    functional collectives keep references to the groups.
    """
    end, idle = time.monotonic() + limit, 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(0.001)  # lets those that wait for Python go on
        idle = 0 if any(map(_is_busy, _listed("/proc/self/task"))) else idle + 1


def _is_busy(task: str) -> bool:
    """Whether a thread of this process runs gloo's collectives, and is not waiting."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb") as file:
            name, _, rest = file.read().rpartition(b")")
    except OSError:  # it has ended
        return False
    return name.endswith(b"(pt_gloo_runloop") and rest.split()[0] not in (b"S", b"I")


def break_store_connection(store: Any) -> int:
    """Break the connection to the store, which ends a wait for one of its keys, as where a group is being created.

    Returns the number of broken connections; a store in a file, which cannot be read for a moment, counts as one.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if (path := getattr(store, "path", None)) is not None:
        return _hide_file(path)
    port = getattr(store, "port", None)
    found = [int(name) for name in _listed("/proc/self/fd") if _link(name).startswith("socket:")]
    return 0 if port is None else sum(_shut_down(fd) for fd in found if _port_of_peer(fd) == port)


def _hide_file(path: str) -> int:
    """Put a folder in the place of a store's file while those that wait look for keys, which they do every 10 ms.

    The file comes back: the store reads it once more when it is destroyed.
    """
    aside = f"{path}.{os.getpid()}"
    try:
        if not os.path.isfile(path):  # another rank does the same
            return 0
        os.rename(path, aside)
        os.mkdir(path)
        time.sleep(_HIDDEN_SECONDS)
        os.rmdir(path)
        os.rename(aside, path)
    except OSError:
        return 0
    return 1


def _port_of_peer(fd: int) -> int | None:
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return int(copy.getpeername()[1])
    except (OSError, IndexError, TypeError, ValueError):  # not connected, or not by TCP
        return None


def _gloo_sockets() -> list[int]:
    """The descriptors that gloo's threads poll: of its sets of descriptors, unlike others, children inherit copies."""
    found = []
    for name in _listed("/proc/self/fd"):
        if not _link(name).startswith("anon_inode:[eventpoll]"):
            continue
        try:
            with open(f"/proc/self/fdinfo/{name}") as file:
                lines = file.read().splitlines()
        except OSError:  # it was closed meanwhile
            continue
        flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_CLOEXEC)
        if not flags & os.O_CLOEXEC:
            found += [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return [fd for fd in found if _link(str(fd)).startswith("socket:")]


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _shut_down(fd: int) -> bool:
    """Shut a connected socket down; one that listens stays, since gloo ends the process when that fails."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with copy:
        try:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return False
    return True
