"""Collectives that the program calls itself, by `torch.distributed`: telling the monitor of them.

The methods of process groups and of pending work are replaced once, by functions that call the original ones. Collectives of
shardwise, and those that C++ code such as DDP's calls, do not come by here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

from shardwise.torch_internals.collectives import Note, monitors, note_of
from shardwise.torch_internals.direct_collectives import is_done

__all__ = ["note_user_collective", "watch_user_collectives"]

_NAMES = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_single",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
}
"""Methods of process groups that all ranks of a group call, with the names that programs know."""
_EQUAL_SIZES = frozenset({"allreduce", "broadcast", "reduce"})
"""Those whose first argument must have the same number of elements on all ranks."""
_MESSAGES = frozenset(map(int, (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)))
"""Works that break the connection if they are waited for in vain for a limited time."""


def note_user_collective(method: str, args: tuple[Any, ...]) -> Note:
    """What to record of a collective; ranks that call the same one have the same note.

    >>> import torch
    >>> note_user_collective("allreduce", ([torch.ones(2, 3)],)).text
    'torch.distributed.all_reduce of 6 elements of float32'
    >>> note_user_collective("barrier", ()).text
    'torch.distributed.barrier'
    """
    text = f"torch.distributed.{_NAMES[method]}"
    first = args[0][0] if args and isinstance(args[0], list) and args[0] else None
    if method in _EQUAL_SIZES and isinstance(first, Tensor):
        text += f" of {first.numel()} elements of {str(first.dtype).removeprefix('torch.')}"
    return note_of(text)


def _monitored(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if monitors and monitors[0].is_current():
            monitors[0].begin(self.group_name, note_user_collective(method, args))
        return original(self, *args, **kwargs)

    return call


def _monitored_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            not monitors or args or kwargs or not monitors[0].is_current()
        ):  # with a timeout of its own, a wait is the program's business
            return original(self, *args, **kwargs)
        if self._get_op_type() in _MESSAGES or not _all_groups_are_gloo():
            return monitors[0].wait_for(lambda: original(self))
        return monitors[0].wait_for(lambda: original(self), lambda limit: is_done(self, limit))

    return wait


def _all_groups_are_gloo() -> bool:
    return all("gloo" in name and "," not in name for name, _ in distributed_c10d._world.pg_map.values())


class _AnySourceWork:
    """The receipt of a message from any rank. Gloo does not end such a wait when connections break."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the message."""
        if not monitors or args or kwargs or not monitors[0].is_current():
            return self._work.wait(*args, **kwargs)
        return monitors[0].wait_for(lambda: _unwatched_wait(self._work), in_thread=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _receives_from_any(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recv_anysource(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _AnySourceWork(original(self, *args, **kwargs))

    return recv_anysource


def _destroys_world(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        if monitors and monitors[0].is_current() and (group is None or group is dist.group.WORLD):
            monitors[0].close()
        return original(group)

    return destroy_process_group


def _unwatched_wait(work: Any) -> Any:
    return getattr(dist.Work.wait, "__wrapped__", dist.Work.wait)(work)


def watch_user_collectives() -> None:
    """Tell the monitor, where there is one, of the collectives that programs call; doing so twice does nothing."""
    if hasattr(dist.Work.wait, "__wrapped__"):
        return
    for method in _NAMES:
        if (original := getattr(dist.ProcessGroup, method, None)) is not None:
            setattr(dist.ProcessGroup, method, _monitored(method, original))
    dist.ProcessGroup.recv_anysource = _receives_from_any(dist.ProcessGroup.recv_anysource)  # type: ignore[method-assign]
    destroy = _destroys_world(dist.destroy_process_group)
    dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy
    dist.Work.wait = _monitored_wait(dist.Work.wait)  # type: ignore[method-assign]
