"""Copying boxes out of a block and into one, whatever the factors of its dims.

A box is what a source block and a target block have in common. The boxes of consecutive peers are usually equal
and adjacent: such a run is copied by one op, so the number of ops depends on the number of runs, not of peers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.mesh import Coord
from shardwise.layout import Layout, Pieces, cut, refine
from shardwise.layout.sizes import same_sizes

__all__ = ["Boxes", "Run", "boxes_in_source", "boxes_in_target", "common_pieces"]

_Box = tuple[tuple[int, int], ...]
"""The start and length of a box along each common factor, from the start of the block."""


def common_pieces(source: Layout, target: Layout) -> Pieces:
    """The common factors of the two layouts of one step."""
    pieces = refine(source, target)
    if pieces is None:
        raise RuntimeError(
            f"{source} -> {target} was planned as one step, but their blocks have no common factors. "
            "This is a bug in shardwise: please report these two layouts."
        )
    return pieces


def boxes_in_source(source: Layout, target: Layout, me: Coord, axes: tuple[int, ...] = ()) -> Boxes:
    """The parts of the source block at `me` that are in the target blocks of its peers over `axes`."""
    pieces = [piece for dim in common_pieces(source, target) for piece in dim]
    return _boxes([(p.size, p.source, p.target) for p in pieces], source.axes.sizes, me, axes)


def boxes_in_target(source: Layout, target: Layout, me: Coord, axes: tuple[int, ...] = ()) -> Boxes:
    """The parts of the target block at `me` that are in the source blocks of its peers over `axes`."""
    pieces = [piece for dim in common_pieces(source, target) for piece in dim]
    return _boxes([(p.size, p.target, p.source) for p in pieces], source.axes.sizes, me, axes)


def _boxes(
    factors: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
    sizes: Sequence[int],
    me: Coord,
    axes: tuple[int, ...],
) -> Boxes:
    """The boxes of the block at `me`, given the size of each factor and the axes that split it for `me` and for peers."""
    peers = list(itertools.product(*(range(sizes[a]) for a in axes)))
    lengths, columns = [], []
    for size, mine, theirs in factors:
        low, high = _range(size, mine, sizes, me)
        lengths.append(high - low)
        varying = [a for a in axes if a in theirs]
        ranges = {}
        for digits in itertools.product(*(range(sizes[a]) for a in varying)):
            coord = list(me)
            for a, i in zip(varying, digits, strict=True):
                coord[a] = i
            first, last = _range(size, theirs, sizes, coord)
            first, last = max(low, first), min(high, last)
            ranges[digits] = (first - low, last - first) if first < last else (0, 0)
        if len(ranges) == len(peers):
            columns.append(list(ranges.values()))
        else:
            picked = [axes.index(a) for a in varying]
            columns.append([ranges[tuple([peer[i] for i in picked])] for peer in peers])
    boxes = tuple(zip(*columns, strict=True)) if columns else ((),) * len(peers)
    return Boxes(tuple(lengths), boxes, tuple([math.prod([count for _, count in box]) for box in boxes]))


def _range(size: int, axes: Sequence[int], sizes: Sequence[int], coord: Sequence[int]) -> tuple[int, int]:
    return cut(size, [sizes[a] for a in axes], [coord[a] for a in axes]) if axes else (0, size)


class Run(NamedTuple):
    """Equal boxes next to each other along one factor; or, if `along` is None, the same box several times."""

    first: _Box
    number: int = 1
    along: int | None = None

    def followed_by(self, box: _Box) -> Run | None:
        """The run with one more box at its end, or None if the box does not continue it."""
        first, number, along = self
        if number == 1 and box != first:
            along = next(d for d, (a, b) in enumerate(zip(first, box, strict=True)) if a != b)
        return Run(first, number + 1, along) if box == _moved(first, along, number) else None

    def union(self) -> _Box:
        """The box around all boxes of the run."""
        if self.along is None:
            return self.first
        start, count = self.first[self.along]
        return (*self.first[: self.along], (start, self.number * count), *self.first[self.along + 1 :])

    @property
    def size(self) -> int:
        return self.number * math.prod([count for _, count in self.first])


def _moved(box: _Box, along: int | None, by: int) -> _Box:
    """The box that is `by` times its own length further along a factor."""
    if along is None:
        return box
    start, count = box[along]
    return (*box[:along], (start + by * count, count), *box[along + 1 :])


class Boxes(NamedTuple):
    """Boxes of a block that has these lengths along the common factors: one for each peer, in peer order."""

    lengths: tuple[int, ...]
    boxes: tuple[_Box, ...]
    counts: tuple[int, ...]  # elements of each box

    def cut(self, block: Tensor) -> Tensor:
        """The first box of a block, with one dim per factor; a view where the strides allow it."""
        return self._cut(block, self.boxes[0])

    def set(self, block: Tensor, value: Tensor) -> None:
        """Write a value into the first box of a contiguous block."""
        where = self.cut(block)
        where.copy_(value.reshape(where.shape))

    def pack(self) -> Callable[[Tensor], Tensor]:
        """A function that copies the boxes of a block, one after the other, into a contiguous flat tensor."""
        runs = self._runs()
        if not runs:
            return lambda block: block.new_empty(0)
        if len(runs) == 1:
            return lambda block: self.stack(block, runs[0]).reshape(-1).contiguous()
        return lambda block: torch.cat([self.stack(block, run).reshape(-1) for run in runs])

    def unpack(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """A function that builds a block of this shape from a flat tensor of its boxes, one after the other."""
        runs = self._runs()
        if self._are_in_order(runs):
            return lambda flat: flat.view(shape)
        counts = [run.size for run in runs]

        def copy(flat: Tensor) -> Tensor:
            block = flat.new_empty(shape)
            for run, part in zip(runs, flat.split(counts) if len(runs) > 1 else (flat,), strict=True):
                where = self.stack(block, run)
                where.copy_(part.view(where.shape))
            return block

        return copy

    def are_in_order(self) -> bool:
        """Whether the boxes one after the other are the block, each part of it once."""
        return sum(self.counts) == math.prod(self.lengths) and self._are_in_order(self._runs())

    def repeated(self, times: int) -> Boxes:
        """The boxes of a block whose elements are this many numbers each, such as bytes."""
        if times == 1:
            return self
        boxes = tuple((*box, (0, times)) for box in self.boxes)
        return Boxes((*self.lengths, times), boxes, tuple(n * times for n in self.counts))

    def _cut(self, block: Tensor, box: _Box) -> Tensor:
        if not same_sizes(block.shape, self.lengths):
            block = block.reshape(self.lengths)
        for dim, (start, count) in enumerate(box):
            if count != self.lengths[dim]:
                block = torch.narrow(block, dim, start, count)
        return block

    def stack(self, block: Tensor, run: Run) -> Tensor:
        """The boxes of a run of a block, along a new first dim."""
        inner = self._cut(block, run.union())
        if run.along is None:
            # compilers write to an expanded view by adding differences, which is not exact
            return inner.unsqueeze(0) if run.number == 1 else inner.expand(run.number, *inner.shape)
        count = run.first[run.along][1]
        return inner.unflatten(run.along, (run.number, count)).movedim(run.along, 0)  # type: ignore[no-any-return]

    def _runs(self) -> list[Run]:
        """The boxes that are not empty, in as few runs as possible."""
        out: list[Run] = []
        for box, count in zip(self.boxes, self.counts, strict=True):
            if count:
                longer = out[-1].followed_by(box) if out else None
                out[-1:] = [longer] if longer else [*out[-1:], Run(box)]
        return out

    def _are_in_order(self, runs: list[Run]) -> bool:
        """Whether boxes one after the other are the block: they split its first factor that is longer than 1."""
        outer = next((d for d, n in enumerate(self.lengths) if n > 1), None)
        if outer is None:
            return True
        position = 0
        for run in runs:
            (start, count), inner = run.union()[outer], run.first[outer + 1 :]
            if start != position or any(
                c != n for (_, c), n in zip(inner, self.lengths[outer + 1 :], strict=True)
            ):
                return False
            position += count
        return True
