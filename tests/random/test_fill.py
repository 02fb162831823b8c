"""Blocks: the fast paths equal the definition bit for bit, and the blocks of any layout are parts of one tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import strategies as ours
from torch import Tensor

from shardwise.layout import LayoutError, owned
from shardwise.random import (
    BlockIndices,
    Draw,
    bernoulli,
    cauchy,
    exponential,
    geometric,
    integers,
    log_normal,
    normal,
    permutation,
    random_range,
    uniform,
)
from shardwise.random import fill as filling

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]

Maker = Callable[[Draw, BlockIndices], Tensor]

MAKERS: dict[str, Maker] = {}
for _t in FLOATS:
    _n = str(_t).removeprefix("torch.")
    MAKERS |= {
        f"uniform {_n}": lambda d, c, t=_t: uniform(d, c, t),
        f"uniform -3..5.1 {_n}": lambda d, c, t=_t: uniform(d, c, t, low=-3.0, high=5.1),
        f"normal {_n}": lambda d, c, t=_t: normal(d, c, t),
        f"normal .3 7 {_n}": lambda d, c, t=_t: normal(d, c, t, mean=0.3, std=7.0),
        f"log_normal {_n}": lambda d, c, t=_t: log_normal(d, c, t),
        f"exponential {_n}": lambda d, c, t=_t: exponential(d, c, t, lambd=0.7),
        f"cauchy {_n}": lambda d, c, t=_t: cauchy(d, c, t, median=0.5, sigma=1.5),
        f"bernoulli {_n}": lambda d, c, t=_t: bernoulli(d, c, t, p=0.3),
        f"geometric {_n}": lambda d, c, t=_t: geometric(d, c, t, p=0.1),
        f"random {_n}": lambda d, c, t=_t: integers(d, c, t, "cpu", *random_range(t, None, None)),
    }
for _t in INTS:
    _n = str(_t).removeprefix("torch.")
    MAKERS |= {
        f"random {_n}": lambda d, c, t=_t: integers(d, c, t, "cpu", *random_range(t, None, None)),
        f"geometric {_n}": lambda d, c, t=_t: geometric(d, c, t, p=0.1),
    }
MAKERS |= {
    "bernoulli bool": lambda d, c: bernoulli(d, c, torch.bool, p=0.9),
    "integers small": lambda d, c: integers(d, c, torch.int64, low=-7, high=50_000),
    "integers 2**40": lambda d, c: integers(d, c, torch.int64, low=-5, high=2**40),
    "integers above 2**63": lambda d, c: integers(d, c, torch.int64, low=-(2**63), high=2**62),
    "integers all": lambda d, c: integers(d, c, torch.int64, low=-(2**63), high=2**63),
    "integers float": lambda d, c: integers(d, c, torch.float32, low=-(2**30) - 1, high=2**31),
    "uniform complex64": lambda d, c: torch.view_as_real(uniform(d, c, torch.complex64)),
    "normal complex128": lambda d, c: torch.view_as_real(normal(d, c, torch.complex128)),
}

draws = st.builds(Draw, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@st.composite
def cells(draw: st.DrawFn) -> BlockIndices:
    """Blocks of up to a few thousand elements, anywhere in tensors of up to 2**47 elements."""
    shape, indices, count = [], [], 1
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13, 257, 1024, 4099, 70_001]))
        if count * size > 2**47:
            break
        count *= size
        most = min(size, draw(st.sampled_from([1, 2, 7, 40])))
        length = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, most))
        if draw(st.booleans()):
            start = draw(st.integers(0, size - length))
            indices.append(range(start, start + length))
        else:
            picks = st.lists(st.integers(0, size - 1), min_size=length, max_size=length, unique=True)
            indices.append(sorted(draw(picks)))
        shape.append(size)
    while math.prod(len(i) for i in indices) > 4000:
        indices[np.argmax([len(i) for i in indices])] = range(1)
    return BlockIndices(shape, indices)


def _bits(t: Tensor) -> Tensor:
    """The bit patterns of values, which distinguish the signs of zeros."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _by_definition(make: Maker, draw: Draw, cells: BlockIndices) -> Tensor:
    def define(draw: Draw, cells: BlockIndices, recipe: filling.Recipe, out: Tensor) -> None:
        values = filling.at(draw, torch.from_numpy(cells.linear(0, cells.numel)), recipe)
        if out.dtype in (torch.bfloat16, torch.float16):
            values = values.to(torch.float32)  # the one intermediate that all paths round through
        out.copy_(values.view(cells.shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_by_numpy", define)
        return make(draw, cells)


def _by_torch(make: Maker, draw: Draw, cells: BlockIndices) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_by_numpy", filling._by_torch)
        return make(draw, cells)


@pytest.mark.parametrize("name", MAKERS)
def test_both_paths_equal_the_definition(name: str) -> None:
    make = MAKERS[name]

    @settings(max_examples=max(5, settings.default.max_examples // 5))
    @given(draws, cells())
    def check(draw: Draw, cells: BlockIndices) -> None:
        fast = make(draw, cells)
        expected = _bits(_by_definition(make, draw, cells))
        assert torch.equal(_bits(fast), expected)
        assert torch.equal(_bits(_by_torch(make, draw, cells)), expected)
        assert fast.is_contiguous()

    check()


@pytest.mark.parametrize("name", ["uniform float32", "uniform float64", "normal float32", "normal float64"])
@pytest.mark.parametrize(
    "block",
    [
        BlockIndices((300_001,), (range(3, 300_000),)),  # longer than a chunk, aligned at neither end
        BlockIndices(
            (3, 2**41), (range(1, 3), range(2**34 - 33_001, 2**34 + 33_002))
        ),  # Philox blocks on both sides of 2**32
        BlockIndices(
            (300, 4099), (range(300), range(1025, 2050))
        ),  # runs with every alignment to a Philox block
        BlockIndices((40_000, 3), (range(40_000), range(1, 2))),  # runs of one element
        BlockIndices((4, 9, 32_768), (range(4), [0, 1, 2, 5, 7], range(32_768))),  # runs of about a chunk
    ],
    ids=repr,
)
def test_large_blocks_equal_the_definition(name: str, block: BlockIndices) -> None:
    make, draw = MAKERS[name], Draw(5, 2**33 + 1)
    expected = _bits(_by_definition(make, draw, block))
    assert torch.equal(_bits(make(draw, block)), expected)
    assert torch.equal(_bits(_by_torch(make, draw, block)), expected)


@pytest.mark.parametrize("chunk", [257, 1024, 5000])
@pytest.mark.parametrize(
    "name", ["uniform float32", "normal float32", "normal float64", "exponential bfloat16"]
)
def test_values_do_not_depend_on_the_chunk_size(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, draw, block = MAKERS[name], Draw(5, 1), BlockIndices((67, 701), (range(67), range(2, 700)))
    expected = make(draw, block)
    monkeypatch.setattr(filling, "CHUNK", chunk)
    assert torch.equal(_bits(make(draw, block)), _bits(expected))


@given(st.data())
def test_blocks_of_any_layout_are_parts_of_one_tensor(data: st.DataObject) -> None:
    axes = data.draw(ours.axes(max_count=16))
    layout = data.draw(ours.layouts(axes))
    make = MAKERS[data.draw(st.sampled_from(sorted(MAKERS)))]
    draw = data.draw(draws)
    shape = layout.shape
    full = make(draw, BlockIndices(shape))
    for coord in itertools.product(*map(range, axes.sizes)):
        index = owned(layout, coord)
        block = make(draw, BlockIndices(shape, index))
        part = full
        for dim, indices in enumerate(index):
            part = part.index_select(dim, torch.tensor(list(indices), dtype=torch.int64))
        assert torch.equal(_bits(block), _bits(part))


@given(cells())
def test_linear_indices_are_row_major(block: BlockIndices) -> None:
    expected = torch.zeros((), dtype=torch.int64)
    for size, index in zip(block.full_shape, block.per_dim, strict=True):
        expected = expected[..., None] * size + torch.tensor(list(index), dtype=torch.int64)
    assert block.linear(0, block.numel).tolist() == expected.reshape(-1).tolist()
    assert block.rows * block.run == block.numel


def test_indices_of_a_few_elements_between_long_runs() -> None:
    block = BlockIndices((2, 2**42), (range(2), range(5, 2**42)))
    end = 2**42 - 5
    assert block.linear(end - 2, end + 2).tolist() == [2**42 - 2, 2**42 - 1, 2**42 + 5, 2**42 + 6]


@pytest.mark.parametrize(
    ("shape", "indices", "rows", "run"),
    [
        ((8, 6), (range(2, 4), range(6)), 1, 12),
        ((8, 6), (range(8), range(2)), 8, 2),
        ((4, 2, 6), (range(4), range(1), range(6)), 4, 6),
        ((4, 1, 6), (range(1, 3), range(1), range(6)), 1, 12),
        ((8,), ([0, 1, 4, 5],), 2, 2),
        ((9, 2), ([0, 1, 4, 5, 6, 7], range(2)), 3, 4),
        ((), (), 1, 1),
    ],
)
def test_adjacent_elements_are_merged_into_one_run(
    shape: tuple[int, ...], indices: tuple, rows: int, run: int
) -> None:
    block = BlockIndices(shape, indices)
    assert (block.rows, block.run) == (rows, run)


def test_too_many_elements_are_an_error() -> None:
    BlockIndices((2**20, 2**29), (range(1), range(1)))
    with pytest.raises(LayoutError, match="2\\*\\*49"):
        BlockIndices((2**20, 2**29 + 1), (range(1), range(1)))


@pytest.mark.parametrize(
    "name",
    [
        "uniform float32",
        "normal bfloat16",
        "normal float64",
        "bernoulli bool",
        "uniform complex64",
        "normal complex128",
    ],
)
def test_out_is_written_to(name: str) -> None:
    kind, dtype = name.split()
    make = {"uniform": uniform, "normal": normal, "bernoulli": bernoulli}[kind]
    t = getattr(torch, dtype)
    block, draw = BlockIndices((5, 6), (range(1, 4), range(2, 5))), Draw(1, 2)
    out = torch.empty(3, 3, dtype=t)
    assert make(draw, block, t, out=out) is out
    assert torch.equal(out, make(draw, block, t))
    transposed = torch.empty(3, 3, dtype=t).T
    assert make(draw, block, t, out=transposed) is transposed
    assert torch.equal(transposed, out)


@pytest.mark.parametrize("n", [1, 2, 100, 4096, 4097, 10_000, 65_537, 100_003])
def test_a_permutation_has_each_number_once_and_can_be_computed_in_blocks(n: int) -> None:
    full = permutation(Draw(3, 9), BlockIndices((n,)))
    assert torch.equal(full.sort().values, torch.arange(n))
    for lo, hi in ((0, n // 3), (n // 3, n), (n - 1, n)):
        assert torch.equal(permutation(Draw(3, 9), BlockIndices((n,), (range(lo, hi),))), full[lo:hi])
    if n > 2:
        assert not torch.equal(full, permutation(Draw(3, 10), BlockIndices((n,))))


def test_a_block_of_a_huge_permutation_is_computed_by_itself() -> None:
    n = 2**45 + 7
    block = permutation(Draw(3, 9), BlockIndices((n,), (range(n - 1000, n),)))
    assert len(block.unique()) == 1000
    assert int(block.min()) >= 0
    assert n // 2 < int(block.max()) < n
