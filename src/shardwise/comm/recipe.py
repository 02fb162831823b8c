"""Recipes: a step compiled for one rank into packing, a collective and unpacking.

Packing and unpacking are local and depend on the coord; the collective between them does not. So the same recipe
runs on a process, and for all ranks of a simulation in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from shardwise.comm.box_copy import boxes_in_source, boxes_in_target, common_pieces
from shardwise.comm.codec import Codec, divided, identity_value, mean_codec, move_codec, reduce_rows, scaled
from shardwise.comm.mesh import Coord
from shardwise.comm.tile_grid import TileGrid, tile_grid
from shardwise.layout import Layout, block_shape
from shardwise.plan import AllGather, AllReduce, AllToAll, Exchange, Identity, ReduceScatter, Slice, Step
from shardwise.plan.exchange import Overlap, Ranges, overlaps, place_of

__all__ = ["Recipe", "as_received", "pack_tiles", "recipe_for"]

_Shape = tuple[int, ...]
_Counts = tuple[int, ...]
_Pack = Callable[[Tensor], Tensor]
_Unpack = Callable[[Tensor, Tensor], Tensor]
_BUG = "This is a bug in shardwise: please report the step."


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one rank runs one step.

    `call` is the collective, or "" for a local step, which is `pack` alone. `pack` returns the contiguous tensor to
    send, `unpack` the target block, given the tensor received and the source block. For an all-to-all, `send` and
    `receive` are the elements to and from each peer, and `sent` those that leave the rank: its own tile does not.
    """

    call: str
    pack: _Pack
    unpack: _Unpack
    codec: Codec
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    sent: int = 0


def recipe_for(step: Step, me: Coord, dtype: torch.dtype) -> Recipe:
    """The recipe of a step for the rank at `me`. Its peers are in row-major order of their coords on `step.axes`."""
    match step:
        case Slice():
            return _local(_slice(step, me))
        case Identity():
            return _local(_identity(step, me))
        case Exchange():
            return _exchange(step, me, dtype)
        case AllGather() | AllToAll():
            return _move(step, me, dtype)
        case AllReduce():
            return _all_reduce(step, me, dtype)
        case ReduceScatter():
            return _reduce_scatter(step, me, dtype)
        case Step():
            raise TypeError(f"there is no recipe for {type(step).__name__}")
        case _:
            assert_never(step)


def _local(run: _Pack) -> Recipe:
    return Recipe("", run, as_received, move_codec(torch.float32))


def as_received(received: Tensor, block: Tensor) -> Tensor:
    """Unpack nothing: what is received is the block."""
    return received


def _slice(step: Step, me: Coord) -> _Pack:
    shape = block_shape(step.target, me)
    if 0 in step.source.shape:
        return lambda block: block.new_empty(shape)
    box = boxes_in_source(step.source, step.target, me)
    # a copy: a view would keep the source block alive, and share writes with it
    return lambda block: box.cut(block).clone(memory_format=torch.contiguous_format).view(shape)


def _identity(step: Step, me: Coord) -> _Pack:
    before, after = dict(step.source.partial), dict(step.target.partial)
    sizes = step.source.axes.sizes
    scale = 1.0
    for a in before:
        if before[a] != after[a]:
            scale *= sizes[a] if after[a] == "avg" else 1 / sizes[a]
    new = {a: op for a, op in after.items() if a not in before}
    if not new:
        return lambda block: scaled(block, scale)
    op = next(iter(new.values()))
    split = step.source.sharded
    scale = math.prod(sizes[a] for a in new if a in split and new[a] == "avg")
    # max, min and avg of equal values are that value; of a sum or product, only one rank may hold it
    holds = all(me[a] == 0 for a in new if a not in split and new[a] in ("sum", "product"))
    box = boxes_in_target(step.source, step.target, me)
    shape = block_shape(step.target, me)

    def run(block: Tensor) -> Tensor:
        out = block.new_full(shape, identity_value(block.dtype, op))
        if holds:
            box.set(out, scaled(block, scale) if scale != 1 else block)
        return out

    return run


def pack_tiles(source: Layout, target: Layout, me: Coord, axes: tuple[int, ...]) -> tuple[_Pack, _Counts]:
    """How to pack the parts of the source block at `me` that its peers over `axes` need, and their sizes."""
    grid = _grid(source, target, me, axes)
    if grid is None:
        boxes = boxes_in_source(source, target, me, axes)
        return boxes.pack(), boxes.counts
    counts, order = grid.leaving()
    if not any(counts):
        return (lambda block: block.new_empty(0)), counts
    return (_flat if order.is_identity else lambda block: _flat(order(block))), counts


def _unpack_tiles(
    source: Layout, target: Layout, me: Coord, axes: tuple[int, ...], received: _Shape = ()
) -> tuple[_Unpack, _Counts]:
    """How to make the target block at `me` of the parts that its peers over `axes` send, and their sizes.

    `received` is the shape in which they arrive, if it is not flat; even splits only.
    """
    shape = block_shape(target, me)
    grid = _grid(source, target, me, axes)
    tiles = None if grid is None else grid.arriving()
    if tiles is None:
        boxes = boxes_in_target(source, target, me, axes)
        if sum(boxes.counts) != math.prod(shape):
            raise RuntimeError(
                f"{source} -> {target}: the group of {me} does not hold all of its block. {_BUG}"
            )
        copy = boxes.unpack(shape)
        return (lambda flat, _: copy(flat)), boxes.counts
    order = tiles.permutation
    if order.is_identity:
        return _reshape(received, shape), tiles.counts
    return (lambda tiles, _: order(tiles).reshape(shape).contiguous()), tiles.counts


def _grid(source: Layout, target: Layout, me: Coord, axes: tuple[int, ...]) -> TileGrid | None:
    return tile_grid(common_pieces(source, target), source.axes.sizes, axes, me)


def _reshape(received: _Shape, shape: _Shape) -> _Unpack:
    return as_received if received == shape else lambda flat, _: flat.view(shape)


def _flat(block: Tensor) -> Tensor:
    return block.reshape(-1).contiguous()


def _whole(shape: _Shape, parts: int, codec: Codec) -> tuple[_Pack, _Shape]:
    """How to send a block as it is, and in what shape: its own if the first dim has that many equal parts, else flat."""
    if codec.is_identity and shape and shape[0] % parts == 0:
        return Tensor.contiguous, shape
    return _flat, (math.prod(shape),)


def _move(step: Step, me: Coord, dtype: torch.dtype) -> Recipe:
    """An all-gather or all-to-all; an uneven all-gather is an all-to-all, so that nothing is padded."""
    codec, where = move_codec(dtype), (step.source, step.target, me, step.axes)
    if isinstance(step, AllGather) and _grid(*where) is not None:
        pack, wire = _whole(block_shape(step.source, me), 1, codec)
        unpack, _ = _unpack_tiles(*where, (step.group_size * wire[0], *wire[1:]))
        return Recipe("all_gather", pack, unpack, codec)
    pack, send = pack_tiles(*where)
    unpack, receive = _unpack_tiles(*where)
    return _all_to_all(step, me, pack, unpack, codec, send, receive)


def _all_to_all(
    step: Step, me: Coord, pack: _Pack, unpack: _Unpack, codec: Codec, send: _Counts, receive: _Counts
) -> Recipe:
    sent = sum(send) - send[place_of(me, step.axes, step.source.axes)]
    return Recipe("all_to_all", pack, unpack, codec, send, receive, sent)


def _exchange(step: Exchange, me: Coord, dtype: torch.dtype) -> Recipe:
    """Ranges of a dim, each from its owner; what a rank keeps is copied and not sent."""
    dim, shape = step.dim, step.shape_at(me)
    if 0 in shape and not step.is_collective:
        return _local(lambda block: block.new_empty(shape))
    here = place_of(me, step.axes, step.source.axes)
    owned, wanted = step.owned[here], step.wanted[here]
    keeping = overlaps(owned, wanted)
    others = [i for i in range(len(step.owned)) if i != here] if step.is_collective else []
    going = {i: _overlaps(owned, step.wanted[i]) for i in others}
    coming = {i: _overlaps(step.owned[i], wanted) for i in others}
    cuts = [(o.start, o.length) for some in going.values() for o in some]
    parts = [o for some in coming.values() for o in some]
    if sum(o.length for o in (*parts, *keeping)) != shape[dim]:
        raise RuntimeError(f"{step}: no rank owns some of the positions that {me} wants. {_BUG}")
    shapes = [(*shape[:dim], o.length, *shape[dim + 1 :]) for o in parts]
    counts = [math.prod(s) for s in shapes]
    order = sorted(range(len(parts) + len(keeping)), key=lambda i: (*parts, *keeping)[i].into)

    def pack(block: Tensor) -> Tensor:
        flat = [block.narrow(dim, start, length).reshape(-1) for start, length in cuts]
        return torch.cat(flat) if flat else block.new_empty(0)

    def unpack(received: Tensor, block: Tensor) -> Tensor:
        if not order:
            return block.new_empty(shape)
        tiles = received.split(counts) if counts else ()
        found = [tile.view(s) for tile, s in zip(tiles, shapes, strict=True)]
        found += [block.narrow(dim, o.start, o.length) for o in keeping]
        return torch.cat([found[i] for i in order], dim).contiguous()

    if not step.is_collective:
        return _local(lambda block: unpack(block, block))
    width = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    send, receive = (_elements(side, len(step.owned), width) for side in (going, coming))
    return Recipe("all_to_all", pack, unpack, move_codec(dtype), send, receive, sum(send))


def _overlaps(owned: Ranges, wanted: Ranges) -> list[Overlap]:
    """The same as `overlaps`, fast for the many peers that have nothing in common."""
    return overlaps(owned, wanted) if any(a < d and c < b for a, b in owned for c, d in wanted) else []


def _elements(by_peer: dict[int, list[Overlap]], peers: int, width: int) -> tuple[int, ...]:
    return tuple(width * sum(o.length for o in by_peer.get(i, ())) for i in range(peers))


def _wire_op(step: Step) -> tuple[str, int]:
    """The op to reduce with, and the number to divide by afterwards."""
    ops = step.reduced
    sizes = step.source.axes.sizes
    mean = math.prod(sizes[a] for a, op in ops.items() if op == "avg")
    op = next(iter(ops.values()))
    return ("sum" if op == "avg" else op), mean


def _divide(mean: float, unpack: _Unpack) -> _Unpack:
    """Unpacking that first divides a sum by the number of its terms."""
    return unpack if mean == 1 else lambda received, block: unpack(divided(received, mean), block)


def _all_reduce(step: Step, me: Coord, dtype: torch.dtype) -> Recipe:
    codec, left = mean_codec(dtype, *_wire_op(step))
    shape = block_shape(step.source, me)
    pack, wire = _whole(shape, 1, codec)
    return Recipe("all_reduce", pack, _divide(left, _reshape(wire, shape)), codec)


def _reduce_scatter(step: Step, me: Coord, dtype: torch.dtype) -> Recipe:
    op, mean = _wire_op(step)
    codec, left = mean_codec(dtype, op, mean)
    shape, peers = block_shape(step.target, me), step.group_size
    count = math.prod(shape)
    pack, send = pack_tiles(step.source, step.target, me, step.axes)
    if min(send) == max(send):
        wire: _Shape = (count * peers,)
        if pack is _flat:
            pack, wire = _whole(block_shape(step.source, me), peers, codec)
        unpack = _reshape((wire[0] // peers, *wire[1:]), shape)
        return Recipe("reduce_scatter", pack, _divide(left, unpack), codec)

    # Blocks differ in size: send each peer exactly its part and reduce here, in the order of the ranks.
    def reduce(received: Tensor, _: Tensor) -> Tensor:
        return divided(reduce_rows(received.view(peers, count), op, mean / left), left).view(shape)

    return _all_to_all(step, me, pack, reduce, move_codec(dtype), send, (count,) * peers)
