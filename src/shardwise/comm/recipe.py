"""Steps made ready for one rank: what to do with its block before and after the collective.

Packing and unpacking are local and depend on the coord; the collective between them does not. So the same
recipe runs on a process, and over all ranks in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from shardwise.comm.box_copy import box_count, box_shape, cut_box, set_box
from shardwise.comm.codec import (
    Codec,
    divided,
    identity_value,
    move_codec,
    reduce_all,
    reduce_codec,
    scaled,
)
from shardwise.comm.mesh import Coord
from shardwise.layout import Box, Pieces, block_shape, meet, refine
from shardwise.plan import AllGather, AllReduce, AllToAll, Exchange, Identity, ReduceScatter, Slice, Step
from shardwise.plan.exchange import overlaps, place_of

__all__ = ["Recipe", "recipe_for"]


@dataclass(frozen=True)
class Recipe:
    """How one rank takes one step.

    `call` is the collective, or "" for a local step, which is `pack` alone. `pack` makes the flat tensor to
    send, `unpack` the new block from the flat tensor received and the old block. For an all-to-all, `send` and
    `receive` count the elements to and from each peer; a rank sends itself nothing.
    """

    call: str
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, Tensor], Tensor]
    codec: Codec
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


def recipe_for(step: Step, me: Coord, peers: tuple[Coord, ...], dtype: torch.dtype) -> Recipe:
    """The recipe of a step for the rank at `me`, whose group has these peers in this order."""
    match step:
        case Slice():
            return _local(_slice(step, me))
        case Identity():
            return _local(_identity(step, me))
        case Exchange():
            return _exchange(step, me, peers, dtype)
        case AllGather() | AllToAll():
            return _move(step, me, peers, dtype)
        case AllReduce():
            return _all_reduce(step, dtype)
        case ReduceScatter():
            return _reduce_scatter(step, me, peers, dtype)
        case Step():
            raise TypeError(f"there is no recipe for {type(step).__name__}")
        case _:
            assert_never(step)


def _local(run: Callable[[Tensor], Tensor]) -> Recipe:
    return Recipe("", run, lambda received, block: received, move_codec(torch.float32))


def _pieces(step: Step) -> Pieces:
    pieces = refine(step.source, step.target)
    if pieces is None:
        raise RuntimeError(f"{step} was planned across blocks, which is a mistake in shardwise")
    return pieces


def _slice(step: Step, me: Coord) -> Callable[[Tensor], Tensor]:
    if 0 in step.source.shape:
        shape = block_shape(step.target, me)
        return lambda block: block.new_empty(shape)
    box, _ = meet(_pieces(step), step.source.axes.sizes, me, me)
    # a copy: a view would keep the whole block alive, and writes to it would be seen in both
    return lambda block: cut_box(block, box).clone(memory_format=torch.contiguous_format)


def _identity(step: Step, me: Coord) -> Callable[[Tensor], Tensor]:
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
    # max, min and avg of equal values are that value; of a sum or product one rank must hold it alone
    holds = all(me[a] == 0 for a in new if a not in split and new[a] in ("sum", "product"))
    _, box = meet(_pieces(step), sizes, me, me)
    shape = block_shape(step.target, me)

    def run(block: Tensor) -> Tensor:
        out = block.new_full(shape, identity_value(block.dtype, op))
        if holds:
            set_box(out, box, scaled(block, scale) if scale != 1 else block)
        return out

    return run


def _move(step: Step, me: Coord, peers: tuple[Coord, ...], dtype: torch.dtype) -> Recipe:
    """Gather or exchange: exact split sizes, or one all-gather where all blocks are alike."""
    pieces, sizes = _pieces(step), step.source.axes.sizes
    shape = block_shape(step.target, me)
    arriving = [meet(pieces, sizes, p, me)[1] for p in peers]
    codec = move_codec(dtype)
    if isinstance(step, AllGather):
        blocks = {block_shape(step.source, p) for p in peers}
        if len(blocks) == 1:
            return Recipe("all_gather", _flat, _unpack_gathered(blocks.pop(), shape, arriving), codec)
    leaving = [meet(pieces, sizes, me, p)[0] for p in peers]
    mine = peers.index(me)
    return _by_boxes([[b] for b in leaving], [[b] for b in arriving], mine, shape, codec)


def _exchange(step: Exchange, me: Coord, peers: tuple[Coord, ...], dtype: torch.dtype) -> Recipe:
    """Ranges of a dim, each from who owns it."""
    on = step.source.axes
    before, after = step.shape_before(me), step.shape_at(me)
    here = place_of(me, step.axes, on)

    def box(block: tuple[int, ...], start: int, length: int) -> Box:
        lengths = tuple((n,) for n in block)
        starts = tuple((start if d == step.dim else 0,) for d in range(len(block)))
        return Box(lengths, starts, tuple((length if d == step.dim else n,) for d, n in enumerate(block)))

    leaving, arriving = [], []
    for place in [place_of(p, step.axes, on) for p in peers or (me,)]:
        out = overlaps(step.owned[here], step.wanted[place])
        coming = overlaps(step.owned[place], step.wanted[here])
        leaving.append([box(before, o.start, o.length) for o in out])
        arriving.append([box(after, o.into, o.length) for o in coming])
    if sum(box_count(b) for boxes in arriving for b in boxes) != math.prod(after):
        raise RuntimeError(f"{step} wants what nobody owns, which is a mistake in shardwise")
    mine = peers.index(me) if peers else 0
    recipe = _by_boxes(leaving, arriving, mine, after, move_codec(dtype))
    return recipe if step.is_collective else _local(lambda block: recipe.unpack(block.new_empty(0), block))


def _by_boxes(
    leaving: list[list[Box]], arriving: list[list[Box]], mine: int, shape: tuple[int, ...], codec: Codec
) -> Recipe:
    """An all-to-all of boxes: those that leave for each peer, and where those that come from it go."""
    keeping = list(zip(leaving[mine], arriving[mine], strict=True))
    going = [[] if i == mine else [b for b in boxes if box_count(b)] for i, boxes in enumerate(leaving)]
    coming = [[] if i == mine else [b for b in boxes if box_count(b)] for i, boxes in enumerate(arriving)]
    send = tuple(sum(map(box_count, boxes)) for boxes in going)
    receive = tuple(sum(map(box_count, boxes)) for boxes in coming)
    flat = [b for boxes in coming for b in boxes]
    counts = [box_count(b) for b in flat]

    def pack(block: Tensor) -> Tensor:
        parts = [cut_box(block, b).reshape(-1) for boxes in going for b in boxes]
        return torch.cat(parts) if parts else block.new_empty(0)

    def unpack(received: Tensor, block: Tensor) -> Tensor:
        out = received.new_empty(shape)
        for here, there in keeping:
            if box_count(there):
                set_box(out, there, cut_box(block, here))
        for part, box in zip(received.split(counts) if counts else (), flat, strict=True):
            set_box(out, box, part)
        return out

    return Recipe("all_to_all", pack, unpack, codec, send, receive)


def _flat(block: Tensor) -> Tensor:
    return block.reshape(-1)


def _unpack_gathered(
    block: tuple[int, ...], shape: tuple[int, ...], arriving: list[Box]
) -> Callable[[Tensor, Tensor], Tensor]:
    grown = [d for d, (a, b) in enumerate(zip(block, shape, strict=True)) if a != b]
    in_a_row = [math.prod(b.starts[grown[0]]) for b in arriving] if len(grown) == 1 else []
    if len(grown) == 1 and len(arriving[0].starts[grown[0]]) == 1 and in_a_row == sorted(in_a_row):
        d = grown[0]
        if math.prod(shape[:d]) == 1:
            return lambda received, _: received.view(shape)
        return lambda received, _: torch.cat(received.view(len(arriving), *block).unbind(0), dim=d)

    def unpack(received: Tensor, _: Tensor) -> Tensor:
        out = received.new_empty(shape)
        for part, box in zip(
            received.chunk(len(arriving)) if received.numel() else (), arriving, strict=False
        ):
            set_box(out, box, part)
        return out

    return unpack


def _wire_op(step: Step) -> tuple[str, int]:
    """The op to reduce by, and what to divide by afterwards."""
    ops = step.reduced
    sizes = step.source.axes.sizes
    mean = math.prod(sizes[a] for a, op in ops.items() if op == "avg")
    op = next(iter(ops.values()))
    return ("sum" if op == "avg" else op), mean


def _all_reduce(step: Step, dtype: torch.dtype) -> Recipe:
    op, mean = _wire_op(step)
    return Recipe(
        "all_reduce",
        _flat,
        lambda received, block: divided(received, mean).view(block.shape),
        reduce_codec(dtype, op),
    )


def _reduce_scatter(step: Step, me: Coord, peers: tuple[Coord, ...], dtype: torch.dtype) -> Recipe:
    pieces, sizes = _pieces(step), step.source.axes.sizes
    op, mean = _wire_op(step)
    leaving = [meet(pieces, sizes, me, p)[0] for p in peers]
    counts = [box_count(b) for b in leaving]
    mine = peers.index(me)
    shape = box_shape(leaving[mine])

    def pack(block: Tensor) -> Tensor:
        parts = [cut_box(block, b).reshape(-1) for b, n in zip(leaving, send, strict=True) if n]
        return torch.cat(parts) if parts else block.new_empty(0)

    if len(set(counts)) == 1:
        send = tuple(counts)
        return Recipe(
            "reduce_scatter",
            pack,
            lambda received, _: divided(received, mean).view(shape),
            reduce_codec(dtype, op),
        )
    # Blocks differ: send each peer exactly its part and reduce here, in the order of the ranks.
    send = tuple(0 if i == mine else n for i, n in enumerate(counts))
    receive = tuple(0 if i == mine else counts[mine] for i in range(len(peers)))

    def unpack(received: Tensor, block: Tensor) -> Tensor:
        parts = list(received.split(receive))
        parts[mine] = cut_box(block, leaving[mine]).reshape(-1)
        return divided(reduce_all(parts, op), mean).view(shape)

    return Recipe("all_to_all", pack, unpack, move_codec(dtype), send, receive)
