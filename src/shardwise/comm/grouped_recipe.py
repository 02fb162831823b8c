"""Grouped recipes: the steps of many tensors compiled for one rank into packing, one collective and unpacking.

What a rank sends to a peer is the parts of all tensors one after the other, so a collective has one flat buffer and nothing
is padded. Values that only move are packed as integers of the size of their dtype, so tensors of several dtypes move together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.box_copy import Boxes, Run, boxes_in_source, boxes_in_target
from shardwise.comm.codec import Codec, divide_in_place, divided, mean_codec, move_codec, reduce_rows
from shardwise.comm.mesh import Coord
from shardwise.comm.recipe import recipe_for
from shardwise.layout import block_shape, contiguous_stride
from shardwise.plan import GroupedStep
from shardwise.plan.exchange import place_of
from shardwise.torch_internals.flat import flattened, parts_of, shape_models

__all__ = ["GroupedRecipe", "grouped_recipe_for"]

_Blocks = Sequence[Tensor]
_Shape = tuple[int, ...]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers as which values are moved, by their size; tensors of several dtypes move as the smallest of them."""
_ALIGNMENT = 64  # bytes between the starts of results of different dtypes
_WIDEST = 16  # bytes of the widest dtype, complex numbers of float64
_LARGE_BLOCK = 1 << 14  # elements, which take longer to read than an op to call


@dataclass(frozen=True, slots=True)
class GroupedRecipe:
    """How one rank runs one grouped step.

    `call` is the collective, or "" for local steps. `pack` returns the flat tensor to send, given the blocks of the members;
    `unpack` their target blocks, given the tensor received, as views of one buffer. For an all-to-all, `send` and `receive`
    are the elements of the wire to and from each peer; `sent` are the bytes that leave the rank there.
    """

    call: str
    pack: Callable[[_Blocks], Tensor]
    unpack: Callable[[Tensor, _Blocks], list[Tensor]]
    codec: Codec
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    sent: int = 0


def grouped_recipe_for(step: GroupedStep, me: Coord, dtypes: Sequence[torch.dtype]) -> GroupedRecipe:
    """The recipe of a grouped step for the rank at `me`, given the dtype of each member.

    Blocks that are reduced may have another dtype: they are cast when they are packed.
    """
    match step.kind:
        case "local":
            return _local(step, me, dtypes)
        case "all-gather" | "all-to-all":
            return _move(step, me, dtypes)
        case "all-reduce":
            return _all_reduce(step, me, dtypes[0])
        case _:
            return _reduce_scatter(step, me, dtypes[0])


def _local(step: GroupedStep, me: Coord, dtypes: Sequence[torch.dtype]) -> GroupedRecipe:
    recipes = [recipe_for(m.step, me, dtype) for m, dtype in zip(step.members, dtypes, strict=True)]

    def unpack(_: Tensor, blocks: _Blocks) -> list[Tensor]:
        return [recipe.pack(block) for recipe, block in zip(recipes, blocks, strict=True)]

    return GroupedRecipe("", lambda blocks: blocks[0], unpack, move_codec(torch.float32))


class _Region(NamedTuple):
    """Boxes of one of the tensors for one or more peers, and where they are in the buffer.

    `stride` is the distance in the buffer between the boxes of two peers.
    """

    tensor: int
    run: Run
    offset: int
    stride: int

    def of_buffer(self, buffer: Tensor) -> Tensor:
        """The part of a flat buffer, with one dim for the peers and one per factor."""
        shape = [count for _, count in self.run.first]
        size, strides = (self.run.number, *shape), (self.stride, *contiguous_stride(shape))
        return buffer.as_strided(size, strides, buffer.storage_offset() + self.offset)


class _Chunks(NamedTuple):
    """A flat buffer of one chunk per peer, each with the boxes of all tensors one after the other."""

    boxes: tuple[Boxes, ...]
    sizes: tuple[int, ...]  # of the chunk of each peer
    regions: tuple[_Region, ...]
    rows: tuple[
        int, ...
    ]  # if blocks are equal boxes in peer order, the elements of a box of each block; otherwise empty

    def pack(self, blocks: _Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The blocks in a buffer of a dtype; None for their own."""
        dtype = dtype or blocks[0].dtype
        if self.rows:  # the chunks are the rows of a matrix, in which each block is some columns
            peers = len(self.sizes)
            parts = [block.view(peers, row) for block, row in zip(blocks, self.rows, strict=True)]
            if blocks[0].dtype is not dtype:
                return torch.cat(parts, 1, out=blocks[0].new_empty(peers, sum(self.rows), dtype=dtype)).view(
                    -1
                )
            return torch.cat(parts, 1).view(-1) if len(parts) > 1 else parts[0].reshape(-1).clone()
        buffer = blocks[0].new_empty(sum(self.sizes), dtype=dtype)
        for region in self.regions:
            part = self.boxes[region.tensor].stack(blocks[region.tensor], region.run)
            region.of_buffer(buffer).copy_(part)
        return buffer

    def unpack(self, buffer: Tensor, blocks: _Blocks) -> None:
        """Fill contiguous blocks from the buffer."""
        if self.rows and type(buffer) is Tensor:
            peers = len(self.sizes)
            parts = [block.view(peers, row) for block, row in zip(blocks, self.rows, strict=True)]
            torch.split_with_sizes_copy(buffer.view(peers, -1), self.rows, 1, out=parts)
            return
        for region in self.regions:
            part = self.boxes[region.tensor].stack(blocks[region.tensor], region.run)
            part.copy_(region.of_buffer(buffer))


def _chunks(boxes: Sequence[Boxes]) -> _Chunks:
    sizes = tuple(map(sum, zip(*(b.counts for b in boxes), strict=True)))
    starts = [0, *itertools.accumulate(sizes)][:-1]
    regions = []
    for index, some in enumerate(boxes):
        before = [sum(b.counts[p] for b in boxes[:index]) for p in range(len(sizes))]
        offsets = [start + skipped for start, skipped in zip(starts, before, strict=True)]
        regions += [_Region(index, run, first, stride) for run, first, stride in _runs(some, offsets)]
    even = all(all(n == b.counts[0] for n in b.counts) and b.are_in_order() for b in boxes) and all(sizes)
    return _Chunks(tuple(boxes), sizes, tuple(regions), tuple(b.counts[0] for b in boxes) if even else ())


def _runs(boxes: Boxes, offsets: Sequence[int]) -> Iterator[tuple[Run, int, int]]:
    """The non-empty boxes in as few runs as possible, each with its first offset and the distance between its boxes."""
    run: Run | None = None
    first = last = stride = 0
    for box, count, offset in zip(boxes.boxes, boxes.counts, offsets, strict=True):
        if not count:
            continue
        longer = run.followed_by(box) if run is not None else None
        if run is not None and longer is not None and (run.number == 1 or offset - last == stride):
            run, stride = longer, offset - last
        else:
            if run is not None:
                yield run, first, stride
            run, first, stride = Run(box), offset, 0
        last = offset
    if run is not None:
        yield run, first, stride


class _Results(NamedTuple):
    """The blocks that a grouped step returns: views of one flat buffer."""

    shapes: tuple[_Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # in elements of the buffer
    size: int
    models: tuple[
        Tensor, ...
    ]  # of the shapes and of what is between, if all have one dtype and none is empty
    places: tuple[int, ...]  # of the results among them, if something is between

    def of(self, buffer: Tensor) -> list[Tensor]:
        if self.models and type(buffer) is Tensor:
            dtype = self.dtypes[0]
            parts = parts_of(buffer if buffer.dtype is dtype else buffer.view(dtype), self.models)
            return [parts[i] for i in self.places] if self.places else parts
        out = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            count = math.prod(shape) * (dtype.itemsize // buffer.itemsize)
            part = buffer[offset : offset + count]
            # data: each result counts writes to itself only, and autograd does not take it for a view of the others
            out.append((part if dtype is buffer.dtype else part.view(dtype)).view(shape).data)
        return out


def _results(
    step: GroupedStep, me: Coord, dtypes: Sequence[torch.dtype], unit: int, *, aligned: bool = False
) -> _Results:
    """The results in a buffer whose elements have `unit` bytes.

    Args:
        step: the step.
        me: the rank.
        dtypes: of the results. Those of different dtypes are padded, which is not sent.
        unit: the size of an element of the buffer.
        aligned: whether to pad results of one dtype, too, so that each can be viewed as complex numbers or in a larger dtype.
    """
    shapes = tuple(block_shape(m.step.target, me) for m in step.members)
    sizes = [math.prod(shape) * dtype.itemsize // unit for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    one_dtype = len(set(dtypes)) == 1
    is_padded = not one_dtype or (aligned and any(start * unit % _WIDEST for start in starts))
    align = _ALIGNMENT // unit if is_padded else 1
    padded = [-(-size // align) * align for size in sizes]
    offsets = tuple(itertools.accumulate(padded, initial=0))
    between = [(more - size) * unit // dtypes[0].itemsize for more, size in zip(padded, sizes, strict=True)]
    parts = [
        part for shape, n in zip(shapes, between, strict=True) for part in ((shape, (n,)) if n else (shape,))
    ]
    counts = itertools.accumulate((2 if n else 1 for n in between), initial=0)
    return _Results(
        shapes,
        tuple(dtypes),
        offsets[:-1],
        offsets[-1],
        shape_models(parts) if one_dtype else (),
        tuple(counts)[:-1] if any(between) else (),
    )


def _words(block: Tensor, word: torch.dtype) -> Tensor:
    """The bits of a block as a flat tensor of integers; without a copy if the block is contiguous."""
    flat = block.resolve_conj().resolve_neg().reshape(-1).contiguous()
    # a single element is contiguous whatever its stride, but `view` requires a stride of 1
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(word)


def _move(step: GroupedStep, me: Coord, dtypes: Sequence[torch.dtype]) -> GroupedRecipe:
    """All-gathers or all-to-alls. An all-gather of uneven blocks is an all-to-all, so that nothing is padded."""
    unit = min(8, *(dtype.itemsize for dtype in dtypes))
    word = _WORDS[unit]
    where = [(m.step.source, m.step.target, me, step.axes) for m in step.members]
    factors = [dtype.itemsize // unit for dtype in dtypes]
    arriving = [boxes_in_target(*w).repeated(k) for w, k in zip(where, factors, strict=True)]
    results, coming = _results(step, me, dtypes, unit, aligned=len(dtypes) > 1), _chunks(arriving)

    def unpack(received: Tensor, blocks: _Blocks) -> list[Tensor]:
        if len(dtypes) == 1 and coming.rows:  # it arrives in the order of the block
            return results.of(received)
        found = results.of(received.new_empty(results.size))
        coming.unpack(received, [_words(b, word) for b in found])
        return found

    if step.kind == "all-gather" and all(n == b.counts[0] for b in arriving for n in b.counts):
        alike = len(set(dtypes)) == 1 and not dtypes[0].is_complex

        def pack_all(blocks: _Blocks) -> Tensor:
            if alike and type(blocks[0]) is Tensor:
                return flattened(blocks).view(word)
            return torch.cat([_words(b, word) for b in blocks])

        return GroupedRecipe("all_gather", pack_all, unpack, move_codec(word))
    going = _chunks([boxes_in_source(*w).repeated(k) for w, k in zip(where, factors, strict=True)])

    def pack(blocks: _Blocks) -> Tensor:
        return going.pack([_words(b, word) for b in blocks])

    return _all_to_all(step, me, pack, unpack, going, coming.sizes, word)


def _all_to_all(
    step: GroupedStep,
    me: Coord,
    pack: Callable[[_Blocks], Tensor],
    unpack: Callable[[Tensor, _Blocks], list[Tensor]],
    going: _Chunks,
    receive: Sequence[int],
    wire: torch.dtype,
) -> GroupedRecipe:
    codec, first = move_codec(wire), step.members[0].step
    leaving = sum(going.sizes) - going.sizes[place_of(me, step.axes, first.source.axes)]
    send, arrive = (tuple(n * codec.scale for n in side) for side in (going.sizes, receive))
    return GroupedRecipe("all_to_all", pack, unpack, codec, send, arrive, leaving * wire.itemsize)


def _means(step: GroupedStep) -> list[int]:
    """The number to divide each member by after a sum."""
    sizes = step.members[0].step.source.axes.sizes
    return [
        math.prod(sizes[a] for a, op in m.step.reduced.items() if op == "avg") for m in step.members
    ]  # fmt: skip


def _views(
    step: GroupedStep, me: Coord, dtype: torch.dtype, already: float
) -> Callable[[Tensor], list[Tensor]]:
    """The results of a reduction: views of what was received, divided where the reduction is a mean.

    They are divided by `already`.
    """
    results, means = _results(step, me, [dtype] * len(step.members), dtype.itemsize), _means(step)
    left = [mean / already for mean in means]
    if len(set(left)) == 1:
        return lambda reduced: results.of(divide_in_place(reduced, left[0]))
    return lambda reduced: [divided(p, by) for p, by in zip(results.of(reduced), left, strict=True)]


def _all_reduce(step: GroupedStep, me: Coord, dtype: torch.dtype) -> GroupedRecipe:
    means = set(_means(step))
    codec, left = mean_codec(dtype, step.op, max(means))
    views = _views(step, me, dtype, max(means) / left)
    results = _results(step, me, [dtype] * len(step.members), dtype.itemsize)
    mean = means.pop() if len(means) == 1 else 1
    # a power of 2 divides exactly before the reduction, too, while the blocks are in the cache
    if 1 < mean == mean & -mean and dtype in (torch.float32, torch.float64):
        return GroupedRecipe(
            "all_reduce",
            lambda blocks: _flattened_and_divided(blocks, results, dtype, mean),
            lambda received, _: results.of(received),
            codec,
        )
    return GroupedRecipe(
        "all_reduce", lambda blocks: flattened(blocks, dtype), lambda received, _: views(received), codec
    )


def _flattened_and_divided(blocks: _Blocks, results: _Results, dtype: torch.dtype, by: int) -> Tensor:
    if type(blocks[0]) is not Tensor:
        return flattened(blocks, dtype) / by
    if results.size < _LARGE_BLOCK * len(blocks):
        return flattened(blocks, dtype).mul_(1 / by)
    out = blocks[0].new_empty(results.size, dtype=dtype)
    for block, part in zip(blocks, results.of(out), strict=True):
        torch.mul(block, 1 / by, out=part)
    return out


def _reduce_scatter(step: GroupedStep, me: Coord, dtype: torch.dtype) -> GroupedRecipe:
    leaving = [boxes_in_source(m.step.source, m.step.target, me, step.axes) for m in step.members]
    going, mean = _chunks(leaving), max(_means(step))
    codec, left = mean_codec(dtype, step.op, mean)
    views = _views(step, me, dtype, mean / left)

    def pack(blocks: _Blocks) -> Tensor:
        return going.pack([b.contiguous() for b in blocks], dtype)

    if all(len(set(b.counts)) == 1 for b in leaving):
        return GroupedRecipe("reduce_scatter", pack, lambda received, _: views(received), codec)
    peers = step.group_size
    mine = sum(math.prod(block_shape(m.step.target, me)) for m in step.members)

    # Blocks differ in size: send each peer exactly its part and reduce here, in the order of the ranks.
    def reduce(received: Tensor, _: _Blocks) -> list[Tensor]:
        return views(reduce_rows(received.view(peers, mine), step.op, mean / left))

    return _all_to_all(step, me, pack, reduce, going, (mine,) * peers, dtype)
