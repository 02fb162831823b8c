"""A number that all ranks of a mesh agree on."""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import axes_of, coord_of
from shardwise.comm.simulate import is_simulated
from shardwise.layout import Axes
from shardwise.torch_internals.collectives import own_collectives

__all__ = ["broadcast_seed"]


def broadcast_seed(mesh: DeviceMesh, number: int) -> int:
    """The number (64 bits, unsigned) of the first rank of the mesh: a broadcast of 8 bytes along each axis."""
    axes = axes_of(mesh)
    if is_simulated():  # all ranks have the same generator
        for i, size in enumerate(axes.sizes):
            _record(axes, i, axes.count // size * (size - 1))
        return number
    if coord_of(mesh) is None or axes.count == 1:
        return number
    signed = number - 2**64 if number >= 2**63 else number
    value = torch.tensor([signed], dtype=torch.int64, device=mesh.device_type)
    for i, size in enumerate(axes.sizes):
        if size == 1:
            continue
        group = mesh.get_group(i)
        with own_collectives():
            dist.broadcast(value, dist.get_global_rank(group, 0), group)
        _record(axes, i, size - 1 if dist.get_rank(group) == 0 else 0)
    return int(value.item()) % 2**64


def _record(axes: Axes, axis: int, copies: int) -> None:
    """Count a broadcast along an axis of which this rank, or in a simulation all ranks together, sent so many copies."""
    if is_counting() and axes.sizes[axis] > 1:
        record(
            Sent("agree on a seed", "broadcast", (axes.names[axis],), axes.sizes[axis], Fraction(8 * copies))
        )
