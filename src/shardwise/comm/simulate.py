"""Which ranks this process plays: one of a real world, or all of a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from shardwise.comm.mesh import Coord, coord_of, members_of
from shardwise.comm.per_rank import PerRank, at_rank, join, name_of, ranks_in
from shardwise.comm.simulated_collectives import watching_meshes

__all__ = ["is_simulated", "on_mesh", "per_rank", "simulate"]

_simulated: list[int] = []


def is_simulated() -> bool:
    """Whether all ranks are played by this process."""
    return bool(_simulated)


@contextmanager
def simulate(world_size: int) -> Iterator[None]:
    """Play all ranks of a world in this process: meshes, tensors, autograd and collectives work as on real ones.

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
            f"simulate({world_size!r}) is not a world.\n"
            "  why: a world has a whole number of ranks, at least 1\n"
            "  fix: simulate(8)"
        )
    if _simulated:
        raise RuntimeError(
            f"simulate({world_size}) inside simulate({_simulated[-1]}).\n"
            "  why: a process plays one world at a time; simulations do not nest\n"
            "  fix: leave the outer one first, or make a smaller mesh inside it"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"simulate({world_size}) inside a process group of {dist.get_world_size()} real ranks.\n"
            "  why: a process is one rank of that group and cannot play others\n"
            "  fix: simulate in a process of its own, or call torch.distributed.destroy_process_group() first"
        )
    stack = list(_mesh_resources.mesh_stack)
    # The fake backend never sends: our steps run over PerRank values and do not ask it to.
    dist.init_process_group("fake", rank=0, world_size=world_size)
    _simulated.append(world_size)
    try:
        with watching_meshes():
            yield
    finally:
        _simulated.pop()
        _mesh_resources.mesh_stack[:] = stack
        if dist.is_initialized():
            dist.destroy_process_group()


def per_rank(fn: Callable[..., Any], *values: Any) -> Any:
    """Call `fn(rank, *values)`: here on a real rank, once for each rank in a simulation.

    Tensors that come back are one per rank; tensors that go in are the rank's own.

    >>> import torch
    >>> with simulate(3):
    ...     per_rank(lambda rank: torch.full((rank,), rank)).ranks
    (tensor([], dtype=torch.int64), tensor([1]), tensor([2, 2]))
    """
    if _simulated:
        ranks = ranks_in(values) or range(_simulated[-1])
        return join({r: fn(r, *_rank_values(values, r)) for r in ranks}, name_of(fn))
    return fn(dist.get_rank() if dist.is_initialized() else 0, *values)


def _rank_values(values: tuple[Any, ...], rank: int) -> list[Any]:
    return [at_rank(v, rank) for v in values]


def on_mesh(mesh: DeviceMesh, fn: Callable[..., Any], *blocks: Tensor) -> Any:
    """Call `fn(coord, *blocks)` on each rank of the mesh that this process plays; None if it plays none.

    Everything that depends on the coord goes through here.
    """
    if _simulated or any(type(b) is PerRank for b in blocks):
        coords = members_of(mesh)
        return join({r: fn(c, *_rank_values(blocks, r)) for r, c in coords.items()}, name_of(fn))
    coord: Coord | None = coord_of(mesh)
    return None if coord is None else fn(coord, *blocks)
