"""Seeding, and the place in the stream of each call that draws."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerMesh, agreed, coord_of, is_simulated, siblings_of
from shardwise.random.philox import Draw
from shardwise.random.stream import EVERYONE, begin, own_stream, restore, snapshot, stream_of

__all__ = ["draw_from", "fork_rng", "get_rng_state", "manual_seed", "next_draw", "set_rng_state"]

_kept = PerMesh()


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Begin the stream that random ops on DTensors draw from, and `shardwise.rand` and its like on plain tensors.

    Every rank gives the same seed; nothing is sent. With a mesh that is only a part of the world, the mesh gets a
    stream of its own: what is drawn on it moves no one else's. torch's own generator is not touched, but
    `torch.manual_seed` begins everyone's stream too.

    >>> import shardwise as sw
    >>> sw.manual_seed(7)
    >>> alone = sw.rand(4, 3)
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     sw.manual_seed(7)
    ...     torch.equal(alone, sw.rand(4, 3, device_mesh=mesh, placements=[sw.Shard(1)]).full_tensor().ranks[1])
    True
    """
    if device_mesh is not None and not is_simulated() and coord_of(device_mesh) is None:
        raise RuntimeError(
            "manual_seed requires the current rank to be a part of the device mesh.\n"
            f"  why: this rank is not on {device_mesh}, holds nothing of its tensors and draws nothing for them\n"
            "  fix: call it only where mesh.get_coordinate() is not None, or without device_mesh for everyone"
        )
    number = int(seed)
    if not -(2**63) <= number < 2**64:
        raise ValueError(
            f"manual_seed({seed}) is not a seed.\n"
            "  why: a seed has 64 bits\n"
            "  fix: use a number from -2**63 to 2**64 - 1"
        )
    begin(EVERYONE if device_mesh is None else _key(device_mesh), number)


def get_rng_state(device_mesh: DeviceMesh | None = None) -> Tensor:
    """Where the stream is: 16 bytes that can be kept in a checkpoint and given to `set_rng_state`."""
    return stream_of(EVERYONE if device_mesh is None else _key(device_mesh)).to_bytes()


def set_rng_state(new_state: Tensor, device_mesh: DeviceMesh | None = None) -> None:
    """Go on from where the stream was when `get_rng_state` returned this. A mesh does so in a stream of its own.

    >>> import shardwise as sw
    >>> here = sw.get_rng_state()
    >>> first = sw.rand(3)
    >>> sw.set_rng_state(here)
    >>> torch.equal(first, sw.rand(3))
    True
    """
    own_stream(EVERYONE if device_mesh is None else _key(device_mesh)).set_bytes(new_state)


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Whatever is drawn or seeded inside, the streams are afterwards where they were before."""
    stream_of()  # a seed that torch's generator was given before counts before
    before = snapshot()
    try:
        yield
    finally:
        if enabled:  # one that it was given inside, and keeps, does not
            restore(before._replace(heeded=torch.initial_seed()))


def next_draw(mesh: DeviceMesh | None = None) -> Draw:
    """The place in the stream of one call on a mesh, or on plain tensors."""
    if mesh is None:
        return stream_of().next()
    stream = stream_of(key := _key(mesh))
    if stream.by_torch and key not in stream.met:
        stream.seed, stream.met = agreed(mesh, stream.seed), stream.met | {key}
    return stream.next()


def draw_from(generator: torch.Generator | None, mesh: DeviceMesh | None = None) -> Draw:
    """The place of one call: in the stream, or given by a generator that the caller passed, which moves on."""
    if generator is None:
        return next_draw(mesh)
    low, high = torch.randint(0, 2**32, (2,), generator=generator, device=generator.device).tolist()
    return Draw(low | high << 32, 0)


def _key(mesh: DeviceMesh) -> Hashable:
    """Which ranks a mesh has, and whether they are all there are."""

    def make() -> Hashable:
        rows = siblings_of(mesh)
        all_there_are = len(rows) == 1 and len(rows[0]) == dist.get_world_size()
        return EVERYONE if all_there_are else tuple(tuple(sorted(row)) for row in rows)

    return _kept.get(mesh, "key", make)
