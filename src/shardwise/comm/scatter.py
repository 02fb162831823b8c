"""Handing out a whole tensor that one rank holds."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.box_copy import box_count, cut_box
from shardwise.comm.codec import move_codec
from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import Coord, axes_of, coord_of, group_of, members_of, siblings_of
from shardwise.comm.per_rank import PerRank
from shardwise.layout import Axes, Box, Layout, block_shape, meet, refine

__all__ = ["block_of", "scatter"]


def _box(layout: Layout, coord: Coord) -> Box:
    """Where a coord's block lies in the whole tensor."""
    pieces = refine(Layout.replicated(layout.shape, layout.axes), layout)
    if pieces is None:
        raise RuntimeError(f"{layout} has a block that cannot be cut, which is a mistake in shardwise")
    return meet(pieces, layout.axes.sizes, coord, coord)[0]


def block_of(whole: Tensor, layout: Layout, coord: Coord) -> Tensor:
    """The block of a whole tensor at a coord, in memory of its own."""
    if 0 in layout.shape:
        return whole.new_empty(block_shape(layout, coord))
    return cut_box(whole, _box(layout, coord)).clone(memory_format=torch.contiguous_format)


def scatter(whole: Tensor, layout: Layout, mesh: DeviceMesh, source: int) -> Tensor | None:
    """The blocks of the tensor held by the rank whose coord is `source` on each axis; None off the mesh.

    Along the axes that split it the tensor is scattered, along the others the blocks are then broadcast.
    """
    split = tuple(sorted(layout.sharded))
    copied = tuple(a for a, n in enumerate(layout.axes.sizes) if a not in layout.sharded and n > 1)
    if type(whole) is PerRank:
        return _simulated(whole, layout, mesh, source, split, copied)
    me = coord_of(mesh)
    if me is None or whole.is_meta or 0 in layout.shape:
        return None if me is None else block_of(whole, layout, me)
    block = whole.new_empty(block_shape(layout, me))
    # ranks beside the source's plane get theirs in the broadcast
    if all(me[a] == source for a in copied):
        block = _scattered(whole, layout, mesh, source, split, me) if split else whole.contiguous()
    return _broadcast(block, mesh, source, copied, me) if copied else block.clone()


def _scattered(
    whole: Tensor, layout: Layout, mesh: DeviceMesh, source: int, axes: tuple[int, ...], me: Coord
) -> Tensor:
    group = group_of(mesh, axes)
    codec = move_codec(whole.dtype)
    is_root = all(me[a] == source for a in axes)
    boxes = [_box(layout, p) for p in group.peers]
    mine = group.peers.index(me)
    root = next(i for i, p in enumerate(group.peers) if all(p[a] == source for a in axes))
    send = [box_count(b) if is_root and i != mine else 0 for i, b in enumerate(boxes)]
    receive = [box_count(boxes[mine]) if i == root and not is_root else 0 for i in range(len(boxes))]
    parts = [cut_box(whole, b).reshape(-1) for b, n in zip(boxes, send, strict=True) if n]
    wire = codec.encode(torch.cat(parts) if parts else whole.new_empty(0)).contiguous()
    if is_counting():
        _record("scatter", layout.axes, axes, wire.nbytes)
    got = torch.ops._c10d_functional.all_to_all_single(
        wire, [n * codec.scale for n in receive], [n * codec.scale for n in send], group.name
    )
    got = codec.decode(torch.ops._c10d_functional.wait_tensor(got))
    return block_of(whole, layout, me) if is_root else got.view(block_shape(layout, me))


def _broadcast(block: Tensor, mesh: DeviceMesh, source: int, axes: tuple[int, ...], me: Coord) -> Tensor:
    group = group_of(mesh, axes)
    codec = move_codec(block.dtype)
    root = next(i for i, p in enumerate(group.peers) if all(p[a] == source for a in axes))
    wire = codec.encode(block.reshape(-1)).contiguous()
    if is_counting():
        copies = len(group.peers) - 1 if group.peers[root] == me else 0
        _record("broadcast", axes_of(mesh), axes, copies * wire.nbytes)
    got = torch.ops._c10d_functional.broadcast(wire, root, group.name)
    got = torch.ops._c10d_functional.wait_tensor(got)
    return codec.decode(got).view(block.shape)


def _record(name: str, names: Axes, axes: tuple[int, ...], nbytes: int) -> None:
    record(Sent(name, name, names.names_of(axes), math.prod(names.sizes_of(axes)), Fraction(nbytes)))


def _simulated(
    whole: PerRank,
    layout: Layout,
    mesh: DeviceMesh,
    source: int,
    split: tuple[int, ...],
    copied: tuple[int, ...],
) -> Tensor:
    names, members = axes_of(mesh), members_of(mesh)
    root = names.number([source] * len(names))
    held = {r: whole.of_rank(ranks[root]) for ranks in siblings_of(mesh) for r in ranks}
    blocks = PerRank({r: block_of(held[r], layout, c) for r, c in members.items()})
    if is_counting():
        itemsize = len(siblings_of(mesh)) * whole.ranks[0].element_size()
        every, kept = math.prod(layout.shape), math.prod(block_shape(layout, names.coord(root)))
        if split:
            _record("scatter", names, split, (every - kept) * itemsize)
        if copied:
            copies = math.prod(names.sizes_of(copied)) - 1
            _record("broadcast", names, copied, copies * every * itemsize)
    return blocks
