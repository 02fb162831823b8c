"""Process groups: creating one under a given name, finding one by name, and a world of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch._C._distributed_c10d import FakeWork, _resolve_process_group
from torch.distributed import distributed_c10d

__all__ = [
    "create_group",
    "fake_world",
    "ranks_are_threads",
    "reduce_op_name",
    "resolve_group",
    "simulated_world",
]

PlainCollective = Callable[..., Any]
"""`run(name, group, *arguments)`: a collective of plain tensors, which every rank of a simulation has."""


def create_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create the group of these ranks in this order; called by its members alone, at the same time.

    `dist.new_group(use_local_synchronization=True)` derives the name from the number of groups of the process, which
    differs between ranks that are on different meshes: they would wait for each other under different names. In torch
    2.15 it also advances a counter on the members alone, after which groups of the whole world no longer match.
    """
    world = distributed_c10d._get_default_group()
    name_of_backend, store = distributed_c10d._world.pg_map[world]
    backend = distributed_c10d.Backend(name_of_backend)
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(world.rank()),
        list(ranks),
        backend,
        store,
        name,  # type: ignore[arg-type]
        timeout=distributed_c10d._get_default_timeout(backend),
        device_id=world.bound_device_id,
        group_desc="shardwise",
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def ranks_are_threads() -> bool:
    """Whether each thread is a rank with a world of its own, as in torch's multi-threaded tests.

    >>> ranks_are_threads()
    False
    """
    return not isinstance(distributed_c10d._world, distributed_c10d._World)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The group with this name, as functional collectives get it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def reduce_op_name(op: Any) -> str:
    """The name of a reduction, which functional collectives have as text.

    >>> reduce_op_name(dist.ReduceOp.SUM), reduce_op_name(dist.ReduceOp(dist.ReduceOp.MAX)), reduce_op_name("avg")
    ('sum', 'max', 'avg')
    """
    if isinstance(op, str):
        return op.lower()
    names = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")
    return next((name for name in names if op == getattr(dist.ReduceOp, name.upper())), str(op))


class _SimulatedGroup(dist.ProcessGroup):
    """A process group whose collectives a function runs, in one process."""

    def __init__(
        self, rank: int, size: int, run: PlainCollective, current_rank: Callable[[], int | None]
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own_rank, self._run, self._current_rank = rank, run, current_rank
        self._name, self._desc = "", ""

    # torch's C++ code reads these
    def getBackendName(self) -> str:  # noqa: N802
        return "fake"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._desc = description

    def getRank(self) -> int:  # noqa: N802
        rank = self._current_rank() if self is dist.group.WORLD else None
        return self._own_rank if rank is None else rank

    def _work(self, name: str, *args: Any) -> Any:
        self._run(name, self, *args)
        return FakeWork()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._work("all_reduce", tensors, reduce_op_name(op))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._work("broadcast", tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._work("all_gather", outputs, inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._work("all_gather_single", output, input)

    _allgather_base = all_gather_single

    def barrier(self, opts: Any = None) -> Any:
        return self._work("barrier")


def _unsupported(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._work(name)


for _method, _name in {
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "gather": "gather",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "scatter": "scatter",
    "send": "send",
}.items():
    setattr(_SimulatedGroup, _method, _unsupported(_name))

_FUNCTIONAL = {
    "all_gather_into_tensor": lambda run, x, size, group: run(
        "functional.all_gather", resolve_group(group), x
    ),
    "all_reduce": lambda run, x, op, group: run("functional.all_reduce", resolve_group(group), x, op),
    "all_to_all_single": lambda run, x, receive, send, group: run("all_to_all_single", resolve_group(group)),
    "broadcast": lambda run, x, source, group: run("functional.broadcast", resolve_group(group), x),
    "reduce_scatter_tensor": lambda run, x, op, size, group: run(
        "reduce_scatter_tensor", resolve_group(group)
    ),
    "wait_tensor": lambda run, x: x,
}
_DEVICE_KEYS = ("CPU", "CUDA", "XPU", "HPU", "PrivateUse1")


@contextmanager
def _functional_collectives(run: PlainCollective) -> Iterator[None]:
    """Run functional collectives of plain tensors by a function, where torch has C++ kernels."""
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for name, kernel in _FUNCTIONAL.items():
            for key in _DEVICE_KEYS:
                library.impl(name, lambda *args, kernel=kernel: kernel(run, *args), key)
        yield


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world of this size whose collectives do nothing.

    `init_process_group` replaces `sys.excepthook`, and the first fake group makes "fake" the default backend of devices
    that have none; both are undone at once. The world is destroyed at the end, unless the caller has done so.
    """
    hook, defaults = sys.excepthook, dict(dist.Backend.default_device_backend_map)
    try:
        dist.init_process_group("fake", rank=rank, world_size=size)
    finally:
        sys.excepthook = hook
        dist.Backend.default_device_backend_map = defaults
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def simulated_world(
    size: int, run: PlainCollective, current_rank: Callable[[], int | None]
) -> Iterator[None]:
    """Be rank 0 of a world of this size, in which `run(name, group, *arguments)` does collectives of plain tensors.

    Where `current_rank()` is not None, `dist.get_rank()` returns it.
    """
    plugins = dist.Backend._plugins

    def create(options: Any, _: Any) -> _SimulatedGroup:
        return _SimulatedGroup(options.group_rank, options.group_size, run, current_rank)

    original = plugins["FAKE"]
    plugins["FAKE"] = dist.Backend._BackendPlugin(create, True)
    try:
        with fake_world(size), _functional_collectives(run):
            yield
    finally:
        plugins["FAKE"] = original
