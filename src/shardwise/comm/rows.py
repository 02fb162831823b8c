"""Rows that go to the ranks that data says: an all-to-all whose sizes are not known before."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import axes_of, coord_of, group_of, groups_along
from shardwise.comm.per_rank import PerRank, at_rank
from shardwise.comm.simulate import is_simulated
from shardwise.torch_internals.collectives import all_to_all, wait
from shardwise.torch_internals.dispatcher import below_autograd

__all__ = ["exchange_rows"]


def exchange_rows(x: Tensor, send: Tensor, receive: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """Send rows to the ranks along an axis and return the rows that they send, in the order of the ranks.

    Args:
        x: the rows, those for the first rank first; in a simulation those of all ranks.
        send: how many go to each rank along the axis.
        receive: how many come from each, so that nobody has to ask.
        mesh: the mesh.
        axis: the index of the axis.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,))
    ...     x = sw.per_rank(lambda rank: torch.arange(3) + 10 * rank)
    ...     exchange_rows(x, torch.tensor([1, 2]), sw.per_rank(lambda rank: torch.tensor([1 + rank] * 2)), mesh, 0).ranks
    (tensor([ 0, 10]), tensor([ 1,  2, 11, 12]))
    """
    if is_simulated() or isinstance(x, PerRank):
        return _simulated(x, send, mesh, axis)
    coord = coord_of(mesh)
    if coord is None:
        return x
    sizes, name = send.tolist(), group_of(mesh, (axis,)).name
    if is_counting():
        record(_entry(x, sum(sizes) - sizes[coord[axis]], mesh, axis))
    with below_autograd():
        return wait(all_to_all(x.contiguous(), receive.tolist(), sizes, name))


def _entry(x: Tensor, rows: int, mesh: DeviceMesh, axis: int) -> Sent:
    axes, width = axes_of(mesh), x.itemsize * x[:1].numel() // max(len(x[:1]), 1)
    return Sent("all-to-all", "all_to_all", axes.names_of((axis,)), axes.sizes[axis], Fraction(rows * width))


def _simulated(x: Tensor, send: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    out: dict[int, Tensor] = {}
    entries = []
    for group in groups_along(mesh, (axis,)):
        sizes = [at_rank(send, r).tolist() for r in group]
        parts = [at_rank(x, r).split(s) for r, s in zip(group, sizes, strict=True)]
        for i, rank in enumerate(group):
            out[rank] = torch.cat([p[i] for p in parts])
            entries.append(_entry(at_rank(x, rank), sum(sizes[i]) - sizes[i][i], mesh, axis))
    if is_counting():
        first = entries[0]
        total = sum((e.bytes for e in entries), Fraction(0))
        record(Sent(first.step, first.called, first.axes, first.group_size, total))
    return PerRank({r: out[r] for r in sorted(out)})
