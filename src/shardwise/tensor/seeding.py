"""Seeding, and the position in the random stream of each call that draws."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerMesh, axes_of, coord_of, is_simulated, siblings_of
from shardwise.comm.broadcast_seed import broadcast_seed
from shardwise.comm.recording import recorders
from shardwise.random.philox import Draw
from shardwise.random.stream import WORLD, Stream, own_stream, restore, snapshot, start_stream, stream_of
from shardwise.tensor.implicit import announce
from shardwise.tensor.observe import observers

__all__ = [
    "draw_from",
    "fork_rng",
    "get_rng_state",
    "manual_seed",
    "next_draw",
    "set_rng_state",
    "settle_stream",
    "stream_key",
]

_keys = PerMesh()


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seed the random stream that ops on DTensors draw from, and `shardwise.rand` and its like on plain tensors.

    torch's own generator is not changed. `torch.manual_seed` seeds this stream too.

    Args:
        seed: the same integer of 64 bits on every rank.
        device_mesh: seed only the stream of this mesh. If the mesh is a part of the world it then has its own stream, and
            draws on it do not advance the stream of other meshes.

    Raises:
        RuntimeError: this rank is not on `device_mesh`.
        ValueError: `seed` does not fit into 64 bits.

    Nothing is communicated.

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
            f"  why: This rank is not on {device_mesh}, so it holds no blocks of its tensors and draws nothing for them.\n"
            "  fix: Call it only where mesh.get_coordinate() is not None, or without device_mesh for all ranks."
        )
    number = int(seed)
    if not -(2**63) <= number < 2**64:
        raise ValueError(
            f"manual_seed got {seed}.\n"
            "  why: A seed has 64 bits.\n"
            "  fix: Use a number from -2**63 to 2**64 - 1."
        )
    _announce_seed()
    start_stream(stream_key(device_mesh), number)


def _announce_seed() -> None:
    for recorder in recorders:
        recorder.heard("seed")


def get_rng_state(device_mesh: DeviceMesh | None = None) -> Tensor:
    """The state of the random stream: 16 bytes, for a checkpoint, that `set_rng_state` accepts.

    Args:
        device_mesh: the state of this mesh's stream, if it has one of its own.

    Nothing is communicated.
    """
    return stream_of(stream_key(device_mesh)).to_bytes()


def set_rng_state(new_state: Tensor, device_mesh: DeviceMesh | None = None) -> None:
    """Continue the random stream from a state that `get_rng_state` returned.

    Args:
        new_state: the state, the same on every rank.
        device_mesh: give this mesh a stream of its own that continues from there.

    Raises:
        ValueError: `new_state` is not such a state.

    Nothing is communicated.

    >>> import shardwise as sw
    >>> here = sw.get_rng_state()
    >>> first = sw.rand(3)
    >>> sw.set_rng_state(here)
    >>> torch.equal(first, sw.rand(3))
    True
    """
    _announce_seed()
    own_stream(stream_key(device_mesh)).set_bytes(new_state)


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Restore all random streams after the block, whatever is drawn or seeded inside.

    Args:
        enabled: False makes the block do nothing.

    Nothing is communicated.
    """
    stream_of()  # notices a seed that torch's generator was given before the block
    before = snapshot()
    try:
        yield
    finally:
        if enabled:  # a seed that torch's generator got inside the block, and keeps, is not noticed later
            restore(before._replace(torch_seed=torch.initial_seed()))


def next_draw(mesh: DeviceMesh | None = None) -> Draw:
    """The position in the stream of one call on a mesh, or on plain tensors.

    After `torch.manual_seed` the ranks may have different seeds: the first draw on a mesh then broadcasts one.
    """
    draw = (stream_of() if mesh is None else settle_stream(mesh)).next()
    if mesh is not None and observers:
        observers[-1].draw(mesh, *draw)
    return draw


def settle_stream(mesh: DeviceMesh) -> Stream:
    """The stream that a mesh draws from, with a seed that its ranks have agreed on."""
    stream = stream_of(key := stream_key(mesh))
    if stream.from_torch and key not in stream.agreed_meshes:
        axes = axes_of(mesh)
        announce(
            "A random op",
            8 * sum(axes.count // n * (n - 1) for n in axes.sizes),
            "Only torch's generator was seeded, which may differ between ranks, so they agree on a seed first.",
            "Seed with shardwise.manual_seed(seed), which sends nothing",
        )
        stream.seed, stream.agreed_meshes = broadcast_seed(mesh, stream.seed), stream.agreed_meshes | {key}
    return stream


def draw_from(generator: torch.Generator | None, mesh: DeviceMesh | None = None) -> Draw:
    """The position of one call: in the stream, or drawn from a generator that the caller passed."""
    if generator is None:
        return next_draw(mesh)
    low, high = torch.randint(0, 2**32, (2,), generator=generator, device=generator.device).tolist()
    draw = Draw(low | high << 32, 0)
    if mesh is not None and observers:
        observers[-1].draw(mesh, *draw)
    return draw


def stream_key(mesh: DeviceMesh | None) -> Hashable:
    """What identifies the stream of a mesh: its ranks, or `WORLD` without a mesh or if it has all ranks of the world."""
    if mesh is None:
        return WORLD

    def make() -> Hashable:
        rows = siblings_of(mesh)
        is_world = len(rows) == 1 and len(rows[0]) == dist.get_world_size()
        return WORLD if is_world else tuple(tuple(sorted(row)) for row in rows)

    return _keys.get(mesh, "key", make)
