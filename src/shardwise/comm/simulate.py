"""Simulation of all ranks of a world in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.mesh import Coord, coord_of, forget_groups, members_of, viewpoints
from shardwise.comm.per_rank import PerRank, at_rank, handle_collectives, join, name_of, ranks_in
from shardwise.comm.per_rank_autograd import install_autograd
from shardwise.comm.plain_collectives import run_plain_collective
from shardwise.comm.rank_hooks import install_hooks
from shardwise.comm.simulated_collectives import run_collective
from shardwise.comm.simulated_groups import known_meshes
from shardwise.comm.simulated_rank import simulated_ranks
from shardwise.torch_internals.local_tensor import local_modes, ranks_of_mode
from shardwise.torch_internals.mesh import restored_mesh_stack
from shardwise.torch_internals.process_groups import simulated_world
from shardwise.torch_internals.rank_queries import process_rank
from shardwise.torch_internals.stance import compiled_functions_run_eagerly

install_autograd()
install_hooks()
handle_collectives(run_collective)

__all__ = [
    "at_simulation_end",
    "forget_world",
    "is_simulated",
    "on_mesh",
    "per_rank",
    "simulate",
    "viewpoint",
]

_simulated: list[int] = []  # the world size, inside a simulation
_at_end: list[Callable[[], object]] = []


class _CurrentRank(threading.local):
    """The rank whose part of `per_rank` runs in this thread."""

    rank: int | None = None


_current = _CurrentRank()


def is_simulated() -> bool:
    """Whether this process simulates all ranks, by `simulate` or by torch's `LocalTensorMode`."""
    return bool(_simulated or local_modes)


def at_simulation_end(callback: Callable[[], object]) -> None:
    """Call a function each time a simulation has ended, normally or by an exception.

    Meant for modules with caches of what belongs to a world. All callbacks run, in the order in which they were
    given, even if one raises.
    """
    _at_end.append(callback)


def forget_world() -> None:
    """Drop what is cached for the meshes of this process, as at the end of a simulation; for when they are destroyed."""
    _call_all([forget_groups, *_at_end])


def _run_plain(name: str, *args: Any) -> Any:
    if (rank := _current.rank) is not None:
        raise RuntimeError(
            f"torch.distributed.{name} was called inside per_rank, for rank {rank}.\n"
            "  why: In a simulation per_rank calls its function for one rank after the other.\n"
            "  fix: Return the tensor from per_rank, and call the collective on its result."
        )
    return run_plain_collective(name, *args)


def _call_all(callbacks: Sequence[Callable[[], object]]) -> None:
    if callbacks:
        try:
            callbacks[0]()
        finally:
            _call_all(callbacks[1:])


@contextmanager
def simulate(world_size: int) -> Iterator[None]:
    """Simulate all ranks of a world in this process: meshes, tensors, autograd and collectives work as on real ranks.

    Args:
        world_size: the number of ranks, at least 1.

    Raises:
        ValueError: `world_size` is not a positive int.
        RuntimeError: inside another simulation, or in a process that is a rank of a process group.

    Nothing is communicated: collectives run on the tensors of all ranks in this process.

    >>> import torch
    >>> from shardwise import DeviceMesh, Shard, distribute_tensor, init_device_mesh
    >>> with simulate(4):
    ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    ...     x = distribute_tensor(torch.arange(6), mesh, [Shard(0)])
    ...     print(x.to_local().ranks)
    (tensor([0, 1]), tensor([2, 3]), tensor([4, 5]), tensor([], dtype=torch.int64))
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"simulate: world_size must be an int of at least 1, got {world_size!r}.\n"
            "  why: It is the number of ranks to simulate.\n"
            "  fix: simulate(8)"
        )
    if _simulated:
        raise RuntimeError(
            f"simulate({world_size}) was called inside simulate({_simulated[-1]}).\n"
            "  why: Simulations cannot be nested.\n"
            "  fix: Leave the outer simulation first, or create a smaller mesh inside it."
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"simulate({world_size}) was called in a process group of {dist.get_world_size()} real ranks.\n"
            "  why: This process is one rank of that group and cannot simulate others.\n"
            "  fix: Simulate in another process, or call torch.distributed.destroy_process_group() first."
        )
    with ExitStack() as stack:
        stack.callback(forget_world)
        stack.enter_context(restored_mesh_stack())
        # nothing is sent: collectives run on the blocks of all ranks, in PerRank tensors
        stack.enter_context(simulated_world(world_size, _run_plain, lambda: _current.rank))
        _simulated.append(world_size)
        stack.callback(_simulated.pop)
        stack.enter_context(known_meshes())
        stack.enter_context(simulated_ranks(lambda: _current.rank))
        stack.enter_context(compiled_functions_run_eagerly(_EAGER))
        yield


_EAGER = (
    "torch.compile runs functions eagerly inside simulate().\n"
    "  why: A block there is one tensor per rank, which a compiler cannot trace.\n"
    "  fix: Nothing, for results are the same; to test compiled code, shardwise.launch(fn, nprocs)"
)


@contextmanager
def viewpoint(rank: int) -> Iterator[None]:
    """Be another rank, for capturing its program: coords are its own, and a simulation is not one of all ranks.

    Blocks must be replaced by those of that rank; nothing can be communicated.
    """
    hidden, _simulated[:] = _simulated[:], []
    before, _current.rank = _current.rank, rank
    viewpoints.append(rank)
    try:
        yield
    finally:
        viewpoints.pop()
        _current.rank = before
        _simulated[:] = hidden


def per_rank(fn: Callable[..., Any], *values: Any) -> Any:
    """Call `fn(rank, *values)` on this rank, or in a simulation once for each rank.

    Args:
        fn: a function of the rank and of the values.
        *values: passed to `fn`; in a simulation it gets the rank's own block of each PerRank tensor among them.

    Returns:
        The result of `fn`; in a simulation, tensors become PerRank tensors.

    Raises:
        RuntimeError: in a simulation, a result that is not a tensor differs between ranks.

    Nothing is communicated.

    >>> import torch
    >>> with simulate(3):
    ...     per_rank(lambda rank: torch.full((rank,), rank)).ranks
    (tensor([], dtype=torch.int64), tensor([1]), tensor([2, 2]))
    """
    if _simulated or local_modes:
        ranks = ranks_in(values) or (range(_simulated[-1]) if _simulated else ranks_of_mode())
        return join({r: _as_rank(r, fn, *_rank_values(values, r)) for r in ranks}, name_of(fn))
    return fn(process_rank() if dist.is_initialized() else 0, *values)


def _as_rank(rank: int, fn: Callable[..., Any], *values: Any) -> Any:
    before, _current.rank = _current.rank, rank
    try:
        return fn(rank, *values)
    finally:
        _current.rank = before


def _rank_values(values: tuple[Any, ...], rank: int) -> list[Any]:
    return [at_rank(v, rank) for v in values]


def on_mesh(mesh: DeviceMesh, fn: Callable[..., Any], *blocks: Tensor) -> Any:
    """Call `fn(coord, *blocks)` on this rank, or in a simulation for each rank of the mesh; None off the mesh.

    Code that depends on the coord goes through this function.
    """
    if _simulated or local_modes or any(type(b) is PerRank for b in blocks):
        coords = members_of(mesh)
        return join({r: fn(c, *_rank_values(blocks, r)) for r, c in coords.items()}, name_of(fn))
    coord: Coord | None = coord_of(mesh)
    return None if coord is None else fn(coord, *blocks)
