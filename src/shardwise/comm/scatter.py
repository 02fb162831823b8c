"""Distributing a full tensor that one rank holds."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.box_copy import boxes_in_source
from shardwise.comm.codec import move_codec
from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import Coord, axes_of, coord_of, group_of, members_of, siblings_of
from shardwise.comm.per_rank import PerRank
from shardwise.comm.recipe import pack_tiles
from shardwise.layout import Axes, Layout, block_shape, dtype_text
from shardwise.plan.exchange import place_of
from shardwise.torch_internals.collectives import all_to_all, broadcast, note_of, wait

__all__ = ["block_of", "scatter"]


def block_of(whole: Tensor, layout: Layout, coord: Coord) -> Tensor:
    """A copy of the block at a coord of a full tensor."""
    shape = block_shape(layout, coord)
    if 0 in layout.shape:
        return whole.new_empty(shape)
    box = boxes_in_source(Layout.replicated(layout.shape, layout.axes), layout, coord)
    return box.cut(whole).clone(memory_format=torch.contiguous_format).view(shape)


def scatter(whole: Tensor, layout: Layout, mesh: DeviceMesh, source: int) -> Tensor | None:
    """The block of this rank of the tensor on the rank whose coord is `source` on each axis; None off the mesh.

    The tensor is scattered along the axes that split it; then the blocks are broadcast along the other axes.
    """
    split = tuple(sorted(layout.sharded))
    copied = tuple(a for a, n in enumerate(layout.axes.sizes) if a not in layout.sharded and n > 1)
    if type(whole) is PerRank:
        return _simulated(whole, layout, mesh, source, split, copied)
    me = coord_of(mesh)
    if me is None or whole.is_meta or 0 in layout.shape:
        return None if me is None else block_of(whole, layout, me)
    block = whole.new_empty(block_shape(layout, me))
    # only ranks with the source's coord on the other axes take part in the scatter
    if all(me[a] == source for a in copied):
        block = _scatter(whole, layout, mesh, source, split, me) if split else whole.contiguous()
    return _broadcast(block, mesh, source, copied, me) if copied else block.clone()


def _scatter(
    whole: Tensor, layout: Layout, mesh: DeviceMesh, source: int, axes: tuple[int, ...], me: Coord
) -> Tensor:
    root, here = place_of([source] * len(me), axes, layout.axes), place_of(me, axes, layout.axes)
    codec, shape = move_codec(whole.dtype), block_shape(layout, me)
    send = [0] * math.prod(layout.axes.sizes_of(axes))
    receive = [*send[:root], math.prod(shape) * codec.scale, *send[root + 1 :]]
    wire = codec.encode(whole.new_empty(0))
    if here == root:
        pack, counts = pack_tiles(Layout.replicated(layout.shape, layout.axes), layout, me, axes)
        wire, send = codec.encode(pack(whole)), [n * codec.scale for n in counts]
    if is_counting():
        _record("scatter", layout.axes, axes, wire.nbytes - send[here] * wire.itemsize)
    names = ", ".join(layout.axes.names_of(axes))
    note = note_of(f"scatter over {names}: {list(layout.shape)} -> {layout} {dtype_text(whole.dtype)}")
    return codec.decode(wait(all_to_all(wire, receive, send, group_of(mesh, axes).name, note))).view(shape)


def _broadcast(block: Tensor, mesh: DeviceMesh, source: int, axes: tuple[int, ...], me: Coord) -> Tensor:
    on = axes_of(mesh)
    root, here = place_of([source] * len(me), axes, on), place_of(me, axes, on)
    codec = move_codec(block.dtype)
    wire = codec.encode(block.reshape(-1).contiguous())
    if is_counting():
        copies = math.prod(on.sizes_of(axes)) - 1 if here == root else 0
        _record("broadcast", on, axes, copies * wire.nbytes)
    note = note_of(
        f"broadcast over {', '.join(on.names_of(axes))}: a block {list(block.shape)} {dtype_text(block.dtype)}"
    )
    return codec.decode(wait(broadcast(wire, root, group_of(mesh, axes).name, note))).view(block.shape)


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
    full = {r: whole.of_rank(ranks[root]) for ranks in siblings_of(mesh) for r in ranks}
    blocks = PerRank({r: block_of(full[r], layout, c) for r, c in members.items()})
    if is_counting():
        itemsize = len(siblings_of(mesh)) * whole.ranks[0].element_size()
        every, kept = math.prod(layout.shape), math.prod(block_shape(layout, names.coord(root)))
        if split:
            _record("scatter", names, split, (every - kept) * itemsize)
        if copied:
            copies = math.prod(names.sizes_of(copied)) - 1
            _record("broadcast", names, copied, copies * every * itemsize)
    return blocks
