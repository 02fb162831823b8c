"""Filling a block: a recipe turns random words into values, here by the definition or by the CPU's fast path."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.random.block_indices import Cells
from shardwise.random.numpy_or_torch import Array
from shardwise.random.philox import CHUNK, Draw, Lanes, counters, philox

__all__ = ["Recipe", "at", "define", "fill", "parts", "words_at"]

_HALF = np.uint64(32)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Recipe(NamedTuple):
    """How words become values: each by itself, or those of the elements 2j and 2j+1 together.

    The words are 32 bits, or 64 if wide. A recipe may overwrite them; its values may be of any dtype that converts.
    """

    wide: bool
    each: Callable[[Array], Array] | None = None
    pair: Callable[[Array, Array], tuple[Array, Array]] | None = None

    @property
    def per_block(self) -> int:
        """How many elements a philox block makes."""
        return 2 if self.wide else 4


def fill(
    draw: Draw,
    cells: Cells,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    out: Tensor | None = None,
) -> Tensor:
    """The block of a tensor of random values, as the definition says, by the fastest way there is on a device.

    `out` is a tensor to write to instead of a new one, of the block's shape, dtype and device.
    """
    device = torch.device(device)
    if out is not None and not (out.is_contiguous() and out.shape == cells.shape and out.dtype == dtype):
        return out.copy_(fill(draw, cells, recipe, dtype, device))
    if out is None:
        out = torch.empty(cells.shape, dtype=dtype, device=device)
    if cells.numel:
        (_by_numpy if device.type == "cpu" else _by_torch)(draw, cells, recipe, out.detach())
    return out


# The definition, on any device


def define(
    draw: Draw,
    cells: Cells,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The block of a tensor of random values, element by element from its global index."""
    device = torch.device(device)
    out = torch.empty(cells.numel, dtype=dtype, device=device)
    for lo, hi in parts(cells.numel, device):
        values = at(draw, torch.from_numpy(cells.linear(lo, hi)).to(device), recipe)
        if dtype in _LOW_PRECISION:
            values = values.to(torch.float32)  # one way of rounding for all
        out[lo:hi] = values
    return out.view(cells.shape)


def parts(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """From where to where each part of a block goes, which bounds what is in memory besides the block.

    On the CPU they are also too small for torch to wake its threads, which costs more than it gains.
    """
    step = 2**14 if device.type == "cpu" else 2**22
    for lo in range(0, count, step):
        yield lo, min(lo + step, count)


def at(draw: Draw, index: Tensor, recipe: Recipe, lane: int = 0) -> Tensor:
    """The values of the elements with these global indices."""
    first, second = words_at(draw, index, recipe.wide, lane)
    odd = (index & 1).bool()
    if recipe.each is not None:
        value: Tensor = recipe.each(torch.where(odd, second, first))
        return value
    if recipe.pair is None:
        raise TypeError("a recipe has a function of each word or of a pair of them")
    value, other = recipe.pair(first, second)
    return torch.where(odd, other, value)


def words_at(draw: Draw, index: Tensor, wide: bool, lane: int = 0) -> tuple[Tensor, Tensor]:
    """The words of the elements 2j and 2j+1, for the pairs in which these global indices are."""
    a, b, c, d = philox(counters(draw, index >> (1 if wide else 2), lane), draw.seed)
    if wide:
        return a | b << 32, c | d << 32
    later = (index & 2).bool()
    return torch.where(later, c, a).to(torch.int32), torch.where(later, d, b).to(torch.int32)


# The ways of filling: whole philox blocks, of which no word is made twice


class _Job(NamedTuple):
    """A piece of a block that is made at a time: elements of one run, or some whole runs of it."""

    row: int
    rows: int
    lo: int
    hi: int


def _jobs(cells: Cells, per: int, chunk: int) -> Iterator[_Job]:
    """The pieces of a block that take up to `chunk` philox blocks each."""
    rows = chunk // _blocks_per_run(cells.run, per)
    if rows:
        for row in range(0, cells.rows, rows):
            yield _Job(row, min(rows, cells.rows - row), 0, cells.run)
        return
    for row in range(cells.rows):
        start = (
            int(cells.starts(row, row + 1)[0]) % per
        )  # pieces end with a block, so that none is made twice
        edges = [0, *range(chunk * per - start, cells.run, chunk * per), cells.run]
        for lo, hi in itertools.pairwise(edges):
            yield _Job(row, 1, lo, hi)


def _blocks_per_run(run: int, per: int) -> int:
    return (run + 2 * per - 2) // per  # of a run that begins anywhere in a block


def _by_torch(draw: Draw, cells: Cells, recipe: Recipe, out: Tensor) -> None:
    per, flat = recipe.per_block, out.view(-1)
    for job in _jobs(cells, per, CHUNK if out.device.type == "cpu" else 2**20):
        length = job.hi - job.lo
        starts = torch.from_numpy(cells.starts(job.row, job.row + job.rows) + job.lo).to(out.device)[:, None]
        n = _blocks_per_run(length, per)
        blocks = starts // per + torch.arange(n, device=out.device)
        values = _of_blocks(draw, blocks.view(-1), recipe).view(job.rows, n * per)
        if out.dtype in _LOW_PRECISION:
            values = values.to(torch.float32)
        begin = job.row * cells.run + job.lo
        places = starts % per + torch.arange(length, device=out.device)
        flat[begin : begin + job.rows * length].view(job.rows, length).copy_(values.gather(1, places))


def _of_blocks(draw: Draw, blocks: Tensor, recipe: Recipe) -> Tensor:
    """The values of all elements of some philox blocks, in their order."""
    a, b, c, d = philox(counters(draw, blocks), draw.seed)
    if recipe.wide:
        first, second = a | b << 32, c | d << 32
    else:
        first, second = torch.stack([a, c], -1).to(torch.int32), torch.stack([b, d], -1).to(torch.int32)
    if recipe.each is not None:
        value: Tensor = recipe.each(torch.stack([first, second], -1).view(-1))
        return value
    if recipe.pair is None:
        raise TypeError("a recipe has a function of each word or of a pair of them")
    return torch.stack(recipe.pair(first, second), -1).view(-1)


def _by_numpy(draw: Draw, cells: Cells, recipe: Recipe, out: Tensor) -> None:
    memory = (out.view(torch.int16) if out.dtype == torch.bfloat16 else out).numpy().reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for job in _jobs(cells, recipe.per_block, CHUNK):
            _make(job, draw, cells, recipe, memory, out.dtype)


def _make(job: _Job, draw: Draw, cells: Cells, recipe: Recipe, out: NDArray[Any], dtype: torch.dtype) -> None:
    lanes, per = _lanes(), recipe.per_block
    starts = cells.starts(job.row, job.row + job.rows)
    length = job.hi - job.lo
    if job.rows == 1:
        first = int(starts[0]) + job.lo
        n = (first + length - 1) // per - first // per + 1
        values = _stored(_values(lanes, draw, lanes.block_range(first // per, n), recipe), dtype)
        begin = job.row * cells.run + job.lo
        out[begin : begin + length] = values[first % per : first % per + length]
        return
    phase = starts % per
    phases = np.unique(phase)
    n = (int(phases[-1]) + length - 1) // per + 1
    blocks = (starts // per)[:, None] + np.arange(n)
    values = _stored(_values(lanes, draw, blocks.reshape(-1).view(np.uint64), recipe), dtype)
    values = values.reshape(job.rows, n * per)
    target = out[job.row * length : (job.row + job.rows) * length].reshape(job.rows, length)
    for p in phases:
        if len(phases) == 1:
            target[:] = values[:, p : p + length]
        else:
            these = np.flatnonzero(phase == p)
            target[these] = values[these, p : p + length]


def _values(lanes: Lanes, draw: Draw, blocks: Any, recipe: Recipe) -> NDArray[Any]:
    """The values of all elements of some philox blocks, in their order."""
    even, odd = lanes.words(draw, blocks)
    n = len(blocks)
    if recipe.pair is not None and not recipe.wide:
        value, other = recipe.pair(even.astype(np.uint32), odd.astype(np.uint32))
        out = np.empty((n, 4), value.dtype)
        out[:, 0], out[:, 2], out[:, 1], out[:, 3] = value[0], value[1], other[0], other[1]
        return out.reshape(-1)
    odd <<= _HALF
    odd |= even
    if recipe.pair is not None:
        value, other = recipe.pair(odd[0].view(np.int64), odd[1].view(np.int64))
        out = np.empty((n, 2), value.dtype)
        out[:, 0], out[:, 1] = value, other
        return out.reshape(-1)
    if recipe.each is None:
        raise TypeError("a recipe has a function of each word or of a pair of them")
    words = np.empty((n, 2), np.uint64)
    words[:, 0], words[:, 1] = odd[0], odd[1]
    return recipe.each(words.reshape(-1).view(np.int64 if recipe.wide else np.uint32))  # type: ignore[no-any-return]


def _stored(values: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Values in a dtype that NumPy can store: it has no bfloat16, which is stored as its memory."""
    if dtype in _LOW_PRECISION and values.dtype != np.float32:
        values = values.astype(np.float32)
    if dtype != torch.bfloat16:
        return values
    memory = values.view(np.uint32)
    carry = memory >> np.uint32(16)
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)  # to nearest, ties to even
    carry += memory
    carry >>= np.uint32(16)
    finite = (memory & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    return np.where(finite, carry, np.uint32(0x7FC0)).astype(np.uint16).view(np.int16)


_mine = threading.local()


def _lanes() -> Lanes:
    if not hasattr(_mine, "lanes"):
        _mine.lanes = Lanes()
    return _mine.lanes  # type: ignore[no-any-return]
