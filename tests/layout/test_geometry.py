import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, block_of, coords, counting, layouts, many, placements, shapes

from shardwise.layout import (
    Axes,
    Layout,
    LayoutError,
    Shard,
    block_offset,
    block_shape,
    contiguous_stride,
    global_shape,
    global_stride,
    largest_block,
    owned,
)


@many
@given(layouts(partial=False))
def test_blocks_partition_the_tensor(layout):
    count = np.zeros(layout.shape, dtype=int)
    for coord in coords(layout.axes):
        if all(coord[a] == 0 for a in range(len(coord)) if a not in layout.sharded):
            count[np.ix_(*(np.asarray(i, dtype=int) for i in owned(layout, coord)))] += 1
    assert (count == 1).all()


@given(layouts())
def test_ranks_that_differ_on_axes_that_split_nothing_own_the_same(layout):
    for coord in coords(layout.axes):
        first = [c if a in layout.sharded else 0 for a, c in enumerate(coord)]
        assert [list(i) for i in owned(layout, coord)] == [list(i) for i in owned(layout, first)]


@many
@given(layouts())
def test_shape_and_offset_are_those_of_the_owned_indices(layout):
    for coord in coords(layout.axes):
        indices = owned(layout, coord)
        assert block_shape(layout, coord) == tuple(len(i) for i in indices)
        for offset, size, mine in zip(block_offset(layout, coord), layout.shape, indices, strict=True):
            assert 0 <= offset <= size
            assert list(mine) == sorted(set(mine))
            if len(mine):
                assert offset == mine[0]


@given(layouts())
def test_the_first_block_is_the_largest(layout):
    counts = [math.prod(block_shape(layout, coord)) for coord in coords(layout.axes)]
    assert largest_block(layout) == counts[0] == max(counts)


@many
@given(st.data())
def test_a_plain_shard_has_the_blocks_of_torch_chunk(data):
    on, shape = data.draw(axes()), data.draw(shapes())
    given_placements = data.draw(placements(on, len(shape)))
    layout = Layout.of(shape, on, given_placements)
    for coord in coords(on):
        block = torch.from_numpy(counting(shape))
        for axis, p in enumerate(given_placements):
            if isinstance(p, Shard):
                chunks = block.chunk(on.sizes[axis], p.dim)
                block = chunks[coord[axis]] if coord[axis] < len(chunks) else block.narrow(p.dim, 0, 0)
        assert np.array_equal(block.numpy(), block_of(counting(shape), owned(layout, coord)))


def _lines(run):
    """The number of lines of Python that a call runs."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("function", [block_shape, block_offset, lambda layout, coord: largest_block(layout)])
def test_the_cost_does_not_depend_on_the_number_of_ranks(function):
    def cost(size):
        layout = Layout.of((2**16, 7), Axes((size, size, size)), (Shard(0), Shard(1), Shard(0)))
        return _lines(lambda: function(layout, (0, 1, 1)))

    assert 0 < cost(16) == cost(2)


@given(axes(max_size=3), st.data())
def test_blocks_of_one_shape_add_up_to_the_global_shape(on, data):
    layout = data.draw(layouts(on, data.draw(shapes(min_size=1)), plain=True))
    block = data.draw(st.tuples(*(st.integers(0, 5) for _ in layout.shape)))
    full = Layout.of(global_shape(layout, block), on, layout.placements)
    for coord in coords(on):
        assert block_shape(full, coord) == block


def test_a_block_with_another_number_of_dims_has_no_global_shape():
    with pytest.raises(LayoutError, match=r"(?s)why: The block has 1 dims and the layout has 2.*fix: "):
        global_shape(Layout.of((2, 3), Axes((2,)), [Shard(0)]), (2,))


@given(shapes(min_size=2), st.data())
def test_global_strides_keep_the_order_of_the_blocks_memory(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    block = data.draw(st.tuples(*(st.integers(2, n) for n in shape)))
    expected = (
        torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))]).stride()
    )
    local = (
        torch.empty([block[d] for d in order]).permute([order.index(d) for d in range(len(order))]).stride()
    )
    assert global_stride(shape, local) == expected


@given(shapes(max_dims=3, min_size=1, max_size=5), st.data())
def test_global_strides_are_dense_for_any_local_strides(shape, data):
    local = data.draw(st.tuples(*(st.integers(0, 9) for _ in shape)))
    strides = global_stride(shape, local)
    positions = sorted(
        sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, shape))
    )
    assert positions == list(range(math.prod(shape)))


@given(shapes())
def test_contiguous_strides_are_those_of_torch(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()
