"""Functional collectives of `torch.ops._c10d_functional`: traceable, and started without waiting.

The `default` overloads are called directly: resolving an overload costs more than the rest of the call in Python.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardwise.torch_internals.direct_collectives import register_work, start_directly, wait_for_work

__all__ = [
    "BROADCAST_FUNCTION",
    "Monitor",
    "Note",
    "all_gather",
    "all_reduce",
    "all_reduce_in_place",
    "all_to_all",
    "broadcast",
    "collective_name",
    "is_own_collective",
    "monitors",
    "note_of",
    "note_traced_group",
    "observers",
    "own_collectives",
    "reduce_scatter",
    "subjects",
    "traced_groups",
    "unwatched",
    "wait",
    "wait_unwatched",
    "waiting",
]

BROADCAST_FUNCTION = "torch.distributed.nn.functional._Broadcast"
"""The autograd function of `torch.distributed.nn.functional.broadcast`, whose backward has a branch for each rank."""

_functional = torch.ops._c10d_functional
_all_gather = _functional.all_gather_into_tensor.default
_all_reduce = _functional.all_reduce.default
_all_reduce_in_place = _functional.all_reduce_.default
_all_to_all = _functional.all_to_all_single.default
_broadcast = _functional.broadcast.default
_reduce_scatter = _functional.reduce_scatter_tensor.default
_wait = _functional.wait_tensor.default

observers: list[object] = []
"""The modes that watch collectives and must tell the program's own from ours; usually none."""
_own_calls: list[None] = []


@contextmanager
def own_collectives() -> Iterator[None]:
    """Mark the collectives inside the block as ours: they are counted by the ledger.

    >>> with own_collectives():
    ...     is_own_collective()
    True
    """
    _own_calls.append(None)
    try:
        yield
    finally:
        _own_calls.pop()


def is_own_collective() -> bool:
    """Whether the collective that runs was called by this library."""
    return bool(_own_calls)


class Note(NamedTuple):
    """What a collective is about, for people, and a number that differs if the text does; the same on all its ranks."""

    text: str
    signature: int


@lru_cache(4096)
def note_of(text: str) -> Note:
    """The note with this text.

    >>> note_of("all-gather over tp: [8:tp] -> [8] f32").signature
    271821329
    """
    return Note(text, zlib.crc32(text.encode()))


class Monitor(Protocol):
    """What watches the collectives of this process; it may raise instead of letting one begin."""

    def is_current(self) -> bool:
        """Whether the world that it watches is that of this process, still."""

    def begin(self, group: str, note: Note) -> bool:
        """A collective of this group is about to begin; whether it is one of gloo, whose wait may have to be given up."""

    def wait(self, tensor: Tensor) -> Tensor:
        """Wait for the collective that returned this tensor."""

    def wait_for(
        self,
        wait: Callable[[], Any],
        is_done: Callable[[timedelta], bool] | None = None,
        in_thread: bool = False,
    ) -> Any:
        """Wait for a collective that the program called itself.

        Args:
            wait: the wait.
            is_done: waits for some time, and returns whether `wait` would not have to.
            in_thread: nothing ends the wait, so that another thread has to do it.
        """

    def close(self) -> None:
        """The world is about to be destroyed."""


monitors: list[Monitor] = []
"""The monitor of this process's world, if there is one."""


subjects: list[str] = []
"""What the collectives that are called now are for, beside their layouts, such as a module; the innermost last."""


_unwatched: set[int] = set()  # threads

traced_groups: set[str] = set()
"""The groups of collectives that were called on tensors without values: graphs of compilers may have these collectives."""


def _call(op: Any, note: Note | None, group: str, tensor: Tensor, *args: Any) -> Any:
    if type(tensor) is not Tensor:
        traced_groups.add(group)
    elif monitors and not tensor.is_meta and not (_unwatched and get_ident() in _unwatched):
        note = note or _default_note(op, tensor)
        note = _with_subject(subjects[-1], note) if subjects and subjects[-1] else note
        if monitors[0].begin(group, note) and not observers:
            return start_directly(op, tensor, *args, group)
    if not observers:
        return op(tensor, *args, group)
    with own_collectives():
        return op(tensor, *args, group)


@lru_cache(4096)
def _with_subject(subject: str, note: Note) -> Note:
    return note_of(f"{subject}: {note.text}")


def _default_note(op: Any, tensor: Tensor) -> Note:
    shape = "" if op is _all_to_all else f" {list(tensor.shape)}"
    return note_of(f"{op.overloadpacket.__name__} of {str(tensor.dtype).removeprefix('torch.')}{shape}")


def all_gather(tensor: Tensor, group_size: int, group: str, note: Note | None = None) -> Tensor:
    """Start to concatenate the tensors of all ranks along dim 0; they must be contiguous and of equal shape."""
    return _call(_all_gather, note, group, tensor, group_size)  # type: ignore[no-any-return]


def all_reduce(tensor: Tensor, op: str, group: str, note: Note | None = None) -> Tensor:
    """Start to reduce the tensors of all ranks by "sum", "product", "max" or "min", into a new tensor."""
    return _call(_all_reduce, note, group, tensor, op)  # type: ignore[no-any-return]


def all_reduce_in_place(tensor: Tensor, op: str, group: str, note: Note | None = None) -> Tensor:
    """Start to reduce like `all_reduce`, into the tensor itself, which is returned."""
    return _call(_all_reduce_in_place, note, group, tensor, op)  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, op: str, group_size: int, group: str, note: Note | None = None) -> Tensor:
    """Start to reduce like `all_reduce`; each rank receives its part of dim 0, which has equal parts."""
    return _call(_reduce_scatter, note, group, tensor, op, group_size)  # type: ignore[no-any-return]


def all_to_all(
    tensor: Tensor, receive: list[int], send: list[int], group: str, note: Note | None = None
) -> Tensor:
    """Start to exchange parts of dim 0, whose lengths are given for each rank of the group."""
    return _call(_all_to_all, note, group, tensor, receive, send)  # type: ignore[no-any-return]


@contextmanager
def unwatched() -> Iterator[None]:
    """A block whose collectives no monitor knows of, as it knows of none in compiled code: other ranks may run other graphs.

    >>> with unwatched():
    ...     pass
    """
    thread = get_ident()
    is_outermost = thread not in _unwatched
    _unwatched.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _unwatched.discard(thread)


def note_traced_group(group: str) -> None:
    """Note that graphs of compilers may have collectives of this group."""
    traced_groups.add(group)


def broadcast(tensor: Tensor, source: int, group: str, note: Note | None = None) -> Tensor:
    """Start to copy the tensor of the rank at index `source` of the group to all others."""
    return _call(_broadcast, note, group, tensor, source)  # type: ignore[no-any-return]


def wait(tensor: Tensor) -> Tensor:
    """Wait for the collective that returned this tensor, and return the tensor."""
    if _unwatched and get_ident() in _unwatched:
        return wait_unwatched(tensor)
    return monitors[0].wait(tensor) if monitors and type(tensor) is Tensor else wait_unwatched(tensor)


def wait_unwatched(tensor: Tensor) -> Tensor:
    """`wait`, of which no monitor knows."""
    wait_for_work(tensor)  # a monitor may have started it
    return _wait(tensor)  # type: ignore[no-any-return]


def waiting(tensor: Tensor) -> Tensor:
    """The tensor that a collective is writing, as torch hands it to programs: an op that reads it waits first.

    >>> type(waiting(torch.zeros(2))).__name__
    'AsyncCollectiveTensor'
    """
    register_work(tensor)
    return AsyncCollectiveTensor(tensor)


_FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": "functional.all_gather",
    "_c10d_functional::all_reduce": "functional.all_reduce",
    "_c10d_functional::all_reduce_": "functional.all_reduce",
    "_c10d_functional::all_to_all_single": "functional.all_to_all",
    "_c10d_functional::broadcast": "functional.broadcast",
    "_c10d_functional::reduce_scatter_tensor": "functional.reduce_scatter",
    "_c10d_functional::wait_tensor": "functional.wait",
    "_c10d_functional::_wrap_tensor_autograd": "functional.wait",
}


def collective_name(func: Callable[..., Any]) -> str | None:
    """The name of a collective, "all_reduce" or "functional.all_reduce"; None for other functions.

    A functional collective that has no function in this module has torch's name, such as "_c10d_functional::isend".

    >>> collective_name(torch.ops._c10d_functional.all_reduce.default)
    'functional.all_reduce'
    >>> collective_name(torch.distributed.all_reduce), collective_name(torch.add)
    ('all_reduce', None)
    """
    name = getattr(func, "_qualified_op_name", None) or getattr(getattr(func, "_schema", None), "name", None)
    if name is not None:
        return _FUNCTIONAL.get(str(name), str(name)) if "c10d" in str(name) else None
    module = getattr(func, "__module__", None) or ""
    return func.__name__ if module.startswith("torch.distributed.distributed_c10d") else None
