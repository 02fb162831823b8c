"""Collectives of gloo called on their process groups, so that a wait for one of them can be given up.

A functional collective keeps its work where only `wait_tensor` finds it, and gloo does not always end that wait when connections
break: a receipt whose header has arrived is forgotten. Here the work is known, and can be waited for a short time. Where torch's
`AsyncCollectiveTensor` is to wait for it as well, `register_work` makes it known as that of a functional collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Work,
    _register_work,
)

from shardwise.torch_internals.process_groups import resolve_group

__all__ = [
    "StartedWork",
    "is_done",
    "is_gloo",
    "register_work",
    "start_directly",
    "take_work",
    "wait_for_work",
]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class StartedWork(NamedTuple):
    """A collective that was started and has not been waited for."""

    work: Work
    tensor: Tensor  # what it returned; the work holds it anyway
    is_registered: bool = False  # `wait_tensor` has to be called, too


_MANY, _MOST = 8, 64
"""With so many works without a wait, those that are done are forgotten; of more, only `wait_tensor` can wait for the oldest."""
_works: dict[int, StartedWork] = {}
"""By the id of the tensor that a collective returned."""
_group_class = dist.ProcessGroup
_all_gather_method = _group_class._allgather_base
_all_reduce_method = _group_class.allreduce
_all_to_all_method = _group_class.alltoall_base
_broadcast_method = _group_class.broadcast
_reduce_scatter_method = _group_class._reduce_scatter_base
_wait_method = Work.wait
"""The methods themselves: those of the classes may be replaced by ones that record what programs call."""


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group uses gloo for tensors on the CPU."""
    backend: Any = group._get_backend(torch.device("cpu"))
    return bool(backend.name() == "gloo")


def _all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    return _keep(out, _all_gather_method(resolve_group(group), out, tensor))


def _all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    return _all_reduce_in_place(tensor.clone(memory_format=torch.contiguous_format), op, group)


def _all_reduce_in_place(tensor: Tensor, op: str, group: str) -> Tensor:
    options = AllreduceOptions()
    options.reduceOp = _OPS[op]  # type: ignore[assignment]
    return _keep(tensor, _all_reduce_method(resolve_group(group), [tensor], options))


def _all_to_all(tensor: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    return _keep(out, _all_to_all_method(resolve_group(group), out, tensor, receive, send))


def _broadcast(tensor: Tensor, source: int, group: str) -> Tensor:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    out = tensor.clone(memory_format=torch.contiguous_format)
    return _keep(out, _broadcast_method(resolve_group(group), [out], options))


def _reduce_scatter(tensor: Tensor, op: str, size: int, group: str) -> Tensor:
    options = ReduceScatterOptions()
    options.reduceOp = _OPS[op]  # type: ignore[assignment]
    out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    return _keep(out, _reduce_scatter_method(resolve_group(group), out, tensor, options))


def _keep(tensor: Tensor, work: Any) -> Tensor:
    if len(_works) >= _MANY:
        _forget_some()
    _works[id(tensor)] = StartedWork(work, tensor)
    return tensor


def _forget_some() -> None:
    """Forget collectives that are complete, since a work keeps its tensor in memory; register the oldest of too many others."""
    for key in [key for key, (work, *_) in _works.items() if work.is_completed() and work.is_success()]:
        del _works[key]
    if len(_works) >= _MOST:
        oldest = next(iter(_works.values())).tensor
        register_work(oldest)
        del _works[id(oldest)]


_functional = torch.ops._c10d_functional
_DIRECT: dict[Any, Callable[..., Tensor]] = {
    _functional.all_gather_into_tensor.default: _all_gather,
    _functional.all_reduce.default: _all_reduce,
    _functional.all_reduce_.default: _all_reduce_in_place,
    _functional.all_to_all_single.default: _all_to_all,
    _functional.broadcast.default: _broadcast,
    _functional.reduce_scatter_tensor.default: _reduce_scatter,
}


def start_directly(op: Any, tensor: Tensor, *args: Any) -> Tensor:
    """Start a functional collective of a group that uses gloo; what it returns is waited for like the op's result.

    Where something watches the ops that are called, or for dtypes that the op converts, the op itself is called.
    """
    if torch._C._len_torch_dispatch_stack() or tensor.device.type != "cpu" or tensor.is_complex():
        return op(tensor, *args)  # type: ignore[no-any-return]
    return _DIRECT[op](tensor, *args)


def take_work(tensor: Tensor) -> StartedWork | None:
    """The work of the collective that returned this tensor, once; None if it is not known."""
    return _works.pop(id(tensor), None)


def wait_for_work(tensor: Tensor) -> None:
    """Wait for the collective that returned this tensor, if it was started here."""
    if _works and (found := take_work(tensor)) is not None:
        _wait_method(found.work)


def register_work(tensor: Tensor) -> None:
    """Let `wait_tensor` wait for the collective that returned this tensor, too."""
    found = _works.get(id(tensor))
    if found is not None and not found.is_registered:
        _register_work(tensor, found.work)
        _works[id(tensor)] = found._replace(is_registered=True)


def is_done(work: Any, limit: timedelta) -> bool:
    """Wait for a work for some time; whether it is done. The error of one that failed is raised."""
    begin = time.monotonic()
    try:
        _wait_method(work, limit)
    except RuntimeError:
        # the work of a collective that gloo does in two steps is never completed if the first one fails
        if time.monotonic() - begin < limit.total_seconds() / 2:
            raise
        if not work.is_completed():
            return False
        _wait_method(work)  # it may have ended just after the limit
    return True
