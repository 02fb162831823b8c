"""The ops under which torch's CommDebugMode counts collectives, and a mode that sees those of the program itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

# registers torch.ops.c10d_functional; the public modules that do so import the package that we replace as well
import torch.distributed._functional_collectives

from shardwise.torch_internals.collectives import is_own_collective, observers
from shardwise.torch_internals.tracing import TorchDispatchMode

__all__ = ["CollectiveObserver", "collective_ops", "grouped_ops"]


def collective_ops() -> dict[str, Any]:
    """By the name of a collective, the op that programs written for torch look it up by."""
    return {
        "all_gather": torch.ops.c10d_functional.all_gather_into_tensor,
        "all_reduce": torch.ops.c10d_functional.all_reduce,
        "reduce_scatter": torch.ops.c10d_functional.reduce_scatter_tensor,
        "all_to_all": torch.ops.c10d_functional.all_to_all_single,
        "broadcast": torch.ops.c10d.broadcast_,
        "scatter": torch.ops.c10d.scatter_,
    }


def grouped_ops() -> dict[str, Any]:
    """The same for a collective on a buffer with blocks of many tensors, as data-parallel training calls them."""
    return collective_ops() | {
        "all_gather": torch.ops.c10d._allgather_base_,
        "all_reduce": torch.ops.c10d.allreduce_,
        "reduce_scatter": torch.ops.c10d._reduce_scatter_base_,
    }


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_NOT_COLLECTIVE = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "send", "wait_tensor"}
_NOT_COLLECTIVE |= {"wait_tensors", "isend", "irecv", "_wrap_tensor_autograd"}


def _counted_op(func: Any) -> Any:
    """The op that a call is looked up by, or None if it is not a collective."""
    if func.namespace not in ("c10d", *_FUNCTIONAL):
        return None
    name = func._opname
    if name in _NOT_COLLECTIVE:
        return None
    if func.namespace == "c10d":
        return func.overloadpacket
    return getattr(torch.ops.c10d_functional, name, func.overloadpacket)


class CollectiveObserver(TorchDispatchMode):
    """Call `seen(op)` for each collective that the program calls itself, not through a DTensor, `others(op, args)` else.

    >>> seen = []
    >>> with CollectiveObserver(seen.append):
    ...     _ = torch.ones(2) + 1
    >>> seen
    []
    """

    def __init__(
        self, seen: Callable[[Any], None], others: Callable[[Any, tuple[Any, ...]], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._others = others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile inside the mode; what the compiled code calls is seen when it runs."""
        return True

    def __enter__(self) -> Self:
        observers.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        observers.remove(self)
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        op = _counted_op(func)
        if op is not None and not is_own_collective():
            self._seen(op)
        if op is None and self._others is not None:
            self._others(func, args)
        return func(*args, **(kwargs or {}))
