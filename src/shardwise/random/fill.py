"""Filling a block with random values: a recipe converts random words to values, in torch or by NumPy on the CPU."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from shardwise.random.block_indices import BlockIndices
from shardwise.random.philox import CHUNK, Draw, Workspace, counters, philox

__all__ = ["Recipe", "at", "distribution", "fill", "parts"]

_HALF = np.uint64(32)
# computed as float32, so that all paths round once and alike
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Recipe(NamedTuple):
    """A conversion of random words to values.

    `wide` selects 64-bit words instead of 32-bit ones. `values` maps words to values elementwise; if `paired`, it maps
    the words of the elements 2j and those of the elements 2j+1 to the values of both. It may overwrite the words and
    return any dtype that converts to the tensor's.
    """

    wide: bool
    values: Callable[..., Any]
    paired: bool = False

    @property
    def per_block(self) -> int:
        """The number of elements that use the words of one Philox block."""
        return 2 if self.wide else 4


def fill(
    draw: Draw,
    indices: BlockIndices,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    out: Tensor | None = None,
) -> Tensor:
    """The random values of a block, written to `out` if given, else to a new tensor.

    The values are those of `at` for each element, computed without repeating a Philox block within a run. A complex
    element i takes the values of the elements 2i and 2i+1 of a real tensor.
    """
    device = torch.device(device)
    if dtype.is_complex:
        real = None if out is None else torch.view_as_real(out)
        real = fill(draw, indices.pairs(), recipe, dtype.to_real(), device, real)
        return torch.view_as_complex(real) if out is None else out
    if out is not None and not (
        out.is_contiguous()
        and out.shape == indices.shape
        and out.dtype == dtype
        and type(out) in (Tensor, Parameter)  # others may have no memory of their own
    ):
        return out.copy_(fill(draw, indices, recipe, dtype, device))
    if out is None:
        out = torch.empty(indices.shape, dtype=dtype, device=device)
    if indices.numel:
        (_by_numpy if device.type == "cpu" else _by_torch)(draw, indices, recipe, out.detach())
    return out


def distribution(recipe: Callable[..., Recipe]) -> Callable[..., Tensor]:
    """Turn a function from a dtype and parameters to a recipe into one that returns the values of a block."""

    @functools.wraps(recipe)
    def sample(
        draw: Draw,
        indices: BlockIndices,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *parameters: Any,
        out: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        return fill(draw, indices, recipe(dtype, *parameters, **named), dtype, device, out)

    return sample


def parts(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The bounds of the parts in which a block is computed, to limit the memory needed besides the block.

    Parts on the CPU are small enough that torch starts no threads, which would cost more than they gain.
    """
    step = 2**14 if device.type == "cpu" else 2**22
    for lo in range(0, count, step):
        yield lo, min(lo + step, count)


def at(draw: Draw, index: Tensor, recipe: Recipe, lane: int = 0) -> Tensor:
    """The values of the elements with these global indices: the definition of all random values, on any device."""
    a, b, c, d = philox(counters(draw, index >> (1 if recipe.wide else 2), lane), draw.seed)
    if recipe.wide:
        first, second = a | b << 32, c | d << 32
    else:
        later = (index & 2).bool()
        first, second = (torch.where(later, *w).to(torch.int32) for w in ((c, a), (d, b)))
    odd = (index & 1).bool()
    value: Tensor
    if recipe.paired:
        value, other = recipe.values(first, second)
        return torch.where(odd, other, value)
    value = recipe.values(torch.where(odd, second, first))
    return value


class _Piece(NamedTuple):
    """A part of a block that is computed at a time: complete runs, or the elements lo to hi of one run."""

    row: int
    rows: int
    lo: int
    hi: int


def _pieces(indices: BlockIndices, per: int, chunk: int) -> Iterator[_Piece]:
    """The pieces of a block that take up to `chunk` Philox blocks each."""
    rows = chunk // _blocks_per_run(indices.run, per)
    if rows:
        for row in range(0, indices.rows, rows):
            yield _Piece(row, min(rows, indices.rows - row), 0, indices.run)
        return
    for row in range(indices.rows):
        # pieces end at the end of a Philox block, so that none is computed twice
        start = int(indices.starts(row, row + 1)[0]) % per
        edges = [0, *range(chunk * per - start, indices.run, chunk * per), indices.run]
        for lo, hi in itertools.pairwise(edges):
            yield _Piece(row, 1, lo, hi)


def _blocks_per_run(run: int, per: int) -> int:
    return (run + 2 * per - 2) // per  # the most that a run can touch, wherever in a block it starts


def _by_torch(draw: Draw, indices: BlockIndices, recipe: Recipe, out: Tensor) -> None:
    per, flat = recipe.per_block, out.view(-1)
    for piece in _pieces(indices, per, CHUNK if out.device.type == "cpu" else 2**20):
        length = piece.hi - piece.lo
        starts = indices.starts(piece.row, piece.row + piece.rows) + piece.lo
        first = torch.from_numpy(starts).to(out.device)[:, None]
        n = _blocks_per_run(length, per)
        blocks = first // per + torch.arange(n, device=out.device)
        values = _torch_values(draw, blocks.view(-1), recipe).view(piece.rows, n * per)
        if out.dtype in _LOW_PRECISION:
            values = values.to(torch.float32)
        begin = piece.row * indices.run + piece.lo
        columns = first % per + torch.arange(length, device=out.device)
        flat[begin : begin + piece.rows * length].view(piece.rows, length).copy_(values.gather(1, columns))


def _torch_values(draw: Draw, blocks: Tensor, recipe: Recipe) -> Tensor:
    """The values of all elements of some Philox blocks, in order."""
    a, b, c, d = philox(counters(draw, blocks), draw.seed)
    if recipe.wide:
        first, second = a | b << 32, c | d << 32
    else:
        first, second = (torch.stack(words, -1).to(torch.int32) for words in ([a, c], [b, d]))
    if recipe.paired:
        return torch.stack(recipe.values(first, second), -1).view(-1)
    value: Tensor = recipe.values(torch.stack([first, second], -1).view(-1))
    return value


def _by_numpy(draw: Draw, indices: BlockIndices, recipe: Recipe, out: Tensor) -> None:
    memory = (out.view(torch.int16) if out.dtype == torch.bfloat16 else out).numpy().reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in _pieces(indices, recipe.per_block, CHUNK):
            _fill_piece(piece, draw, indices, recipe, memory, out.dtype)


def _fill_piece(
    piece: _Piece, draw: Draw, indices: BlockIndices, recipe: Recipe, out: NDArray[Any], dtype: torch.dtype
) -> None:
    workspace, per = _workspace(), recipe.per_block
    starts = indices.starts(piece.row, piece.row + piece.rows)
    length = piece.hi - piece.lo
    if piece.rows == 1:
        first = int(starts[0]) + piece.lo
        n = (first + length - 1) // per - first // per + 1
        blocks = workspace.block_range(first // per, n)
        values = _to_storage(_numpy_values(workspace, draw, blocks, recipe), dtype)
        begin = piece.row * indices.run + piece.lo
        out[begin : begin + length] = values[first % per : first % per + length]
        return
    phase = starts % per
    phases = np.unique(phase)
    n = (int(phases[-1]) + length - 1) // per + 1
    blocks = ((starts // per)[:, None] + np.arange(n)).reshape(-1).view(np.uint64)
    values = _to_storage(_numpy_values(workspace, draw, blocks, recipe), dtype).reshape(piece.rows, n * per)
    target = out[piece.row * length : (piece.row + piece.rows) * length].reshape(piece.rows, length)
    for p in phases:
        if len(phases) == 1:
            target[:] = values[:, p : p + length]
        else:
            these = np.flatnonzero(phase == p)
            target[these] = values[these, p : p + length]


def _numpy_values(workspace: Workspace, draw: Draw, blocks: Any, recipe: Recipe) -> NDArray[Any]:
    """The values of all elements of some Philox blocks, in order."""
    even, odd = workspace.words(draw, blocks)
    n = len(blocks)
    if recipe.paired and not recipe.wide:
        value, other = recipe.values(even.astype(np.uint32), odd.astype(np.uint32))
        out = np.empty((n, 4), value.dtype)
        out[:, 0], out[:, 2], out[:, 1], out[:, 3] = value[0], value[1], other[0], other[1]
        return out.reshape(-1)
    odd <<= _HALF
    odd |= even
    if recipe.paired:
        value, other = recipe.values(odd[0].view(np.int64), odd[1].view(np.int64))
        out = np.empty((n, 2), value.dtype)
        out[:, 0], out[:, 1] = value, other
        return out.reshape(-1)
    words = np.empty((n, 2), np.uint64)
    words[:, 0], words[:, 1] = odd[0], odd[1]
    return recipe.values(words.reshape(-1).view(np.int64 if recipe.wide else np.uint32))  # type: ignore[no-any-return]


def _to_storage(values: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Values as NumPy stores them in a tensor's memory: bfloat16, which NumPy lacks, as its bit patterns."""
    if dtype in _LOW_PRECISION and values.dtype != np.float32:
        values = values.astype(np.float32)
    if dtype != torch.bfloat16:
        return values
    pattern = values.view(np.uint32)
    carry = pattern >> np.uint32(16)
    carry &= np.uint32(1)
    carry += np.uint32(0x7FFF)  # to nearest, ties to even
    carry += pattern
    carry >>= np.uint32(16)
    is_number = (pattern & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    return np.where(is_number, carry, np.uint32(0x7FC0)).astype(np.uint16).view(np.int16)


_per_thread = threading.local()


def _workspace() -> Workspace:
    if not hasattr(_per_thread, "workspace"):
        _per_thread.workspace = Workspace()
    return _per_thread.workspace  # type: ignore[no-any-return]
