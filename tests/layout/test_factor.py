import itertools
import math
from collections import defaultdict
from operator import mul

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import (
    axes,
    coords,
    divisors,
    every_writing,
    layouts,
    many,
    owned_by_definition,
    shapes,
    writings,
)

from shardwise.layout import Axes, Factor, Layout, cut, first_block, owned
from shardwise.layout.factor import atoms, canonical, split, take

parts = st.lists(st.integers(1, 4), max_size=3)


@given(st.integers(0, 50), parts)
def test_the_ranges_of_all_coords_are_adjacent_and_cover_the_size(size, parts):
    end = 0
    for coord in itertools.product(*(range(n) for n in parts)):
        low, high = cut(size, parts, coord)
        assert low == end <= high
        end = high
    assert end == size


@given(st.integers(0, 50), parts)
def test_no_block_is_larger_than_the_first(size, parts):
    blocks = [cut(size, parts, coord) for coord in itertools.product(*(range(n) for n in parts))]
    assert first_block(size, parts) == max(high - low for low, high in blocks) == blocks[0][1]


@many
@given(st.data())
def test_the_canonical_form_has_the_blocks_that_were_written(data):
    on, shape = data.draw(axes()), data.draw(shapes())
    writing = data.draw(writings(on, shape))
    layout = Layout(on, writing)
    assert layout.shape == shape
    for coord in coords(on):
        assert tuple(map(tuple, owned(layout, coord))) == owned_by_definition(writing, on, coord)


@given(layouts())
def test_the_canonical_form_is_a_fixed_point(layout):
    for dim in layout.dims:
        assert canonical(dim, layout.axes.sizes) == dim


def _rewritings(dim, on):
    """The ways to split one factor of a dim, or to insert a factor of size 1, that keep its blocks."""
    before = [owned_by_definition([dim], on, coord) for coord in coords(on)]
    for i, f in enumerate(dim):
        for outer in divisors(f.size):
            for k in range(len(f.axes) + 1):
                new = [
                    *dim[:i],
                    Factor(outer, f.axes[:k]),
                    Factor(f.size // outer, f.axes[k:]),
                    *dim[i + 1 :],
                ]
                if [owned_by_definition([new], on, coord) for coord in coords(on)] == before:
                    yield new


@given(st.data())
def test_all_ways_to_write_a_layout_give_the_same_object(data):
    on = data.draw(axes(max_count=18))
    layout = data.draw(layouts(on, data.draw(shapes(max_dims=2, min_size=1, max_size=24))))
    writing = [list(dim) for dim in layout.dims]
    for _ in range(data.draw(st.integers(1, 3))):
        for d, dim in enumerate(writing):
            writing[d] = data.draw(st.sampled_from([dim, *_rewritings(dim, on)]))
    assert layout.with_dims(writing) is layout


@pytest.mark.parametrize(
    ("sizes", "largest"), [((2, 2), 24), ((3, 2), 24), ((2, 3, 2), 12), ((7,), 72), ((4, 3), 12)]
)
def test_layouts_with_the_same_blocks_are_the_same_object(sizes, largest):
    on = Axes(sizes)
    for n in range(1, largest + 1):
        found = defaultdict(set)
        for writing in every_writing(on, (n,)):
            layout = Layout(on, writing)
            mine = tuple(owned_by_definition(writing, on, coord) for coord in coords(on))
            assert mine == tuple((tuple(owned(layout, coord)[0]),) for coord in coords(on)), (writing, layout)
            found[mine].add(layout)
        assert all(len(same) == 1 for same in found.values()), [s for s in found.values() if len(s) > 1]


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ([Factor(2), Factor(3), Factor(4)], [Factor(24)]),
        ([Factor(4, (0,)), Factor(6)], [Factor(24, (0,))]),
        ([Factor(3, (0,)), Factor(4)], [Factor(3, (0,)), Factor(4)]),
        ([Factor(2, (0,)), Factor(3, (1,))], [Factor(6, (0, 1))]),
        ([Factor(4, (0,)), Factor(3, (1,))], [Factor(4, (0,)), Factor(3, (1,))]),
        # an uneven split grows as far as it can: (4, 4, 2) is 10 over 3, but (8, 8, 4) is not 20 over 3
        ([Factor(5, (1,)), Factor(4)], [Factor(10, (1,)), Factor(2)]),
        # and to the same size from every start: 13 over 7 absorbs at most a factor of 6
        ([Factor(13, (3,)), Factor(12)], [Factor(78, (3,)), Factor(2)]),
        ([Factor(52, (3,)), Factor(3)], [Factor(78, (3,)), Factor(2)]),
        # an axis of size 1 splits nothing
        ([Factor(4, (2,)), Factor(6, (0,))], [Factor(4), Factor(6, (0,))]),
        # once every block has one element, only the first coord of a further axis has it
        ([Factor(2, (0, 1))], [Factor(2, (0, 1))]),
        ([Factor(1, (1,)), Factor(2, (0,))], [Factor(2, (0, 1))]),
        ([Factor(3), Factor(1, (1,)), Factor(2)], [Factor(1, (1,)), Factor(6)]),
        ([Factor(1, (1, 0))], [Factor(1, (0, 1))]),
        ([Factor(1)], []),
        ([Factor(3, (0,)), Factor(0), Factor(2, (1,))], [Factor(0, (0, 1))]),
    ],
)
def test_examples_of_canonical_forms(written, form):
    assert canonical(written, (2, 3, 1, 7)) == tuple(form)


@given(layouts(shape=(12, 36, 30)), st.data())
def test_splitting_a_factor_keeps_its_blocks(layout, data):
    on = layout.axes
    f = data.draw(st.sampled_from([f for dim in layout.dims for f in dim]))
    outer = data.draw(st.sampled_from(divisors(f.size)))
    halves = split(f, outer, on.sizes)
    if halves is None:
        ways = [
            [Factor(outer, f.axes[:k]), Factor(f.size // outer, f.axes[k:])] for k in range(len(f.axes) + 1)
        ]
    else:
        assert halves[0].size == outer
        ways = [list(halves)]
    same_blocks = [
        all(
            owned_by_definition([way], on, coord) == owned_by_definition([[f]], on, coord)
            for coord in coords(on)
        )
        for way in ways
    ]
    assert any(same_blocks) == (halves is not None)


@pytest.mark.parametrize("outer", [0, 5, 7, 25])
def test_a_factor_is_split_only_by_a_divisor(outer):
    assert split(Factor(24), outer, ()) is None


@many
@given(layouts(shape=(24, 13)))
def test_atoms_have_the_blocks_of_the_dim_and_cannot_be_split(layout):
    sizes = layout.axes.sizes
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        small, idle = atoms(dim, sizes)
        assert math.prod(f.size for f in small) == size
        assert canonical([Factor(1, idle), *small], sizes) == dim
        for f in small:
            if f.axes:
                assert all(split(f, outer, sizes) is None for outer in divisors(f.size)[1:-1])
        assert all(a.axes or b.axes for a, b in itertools.pairwise(small))


@given(layouts(shape=(36,)), st.sampled_from(divisors(36)))
def test_taking_the_outer_atoms_keeps_the_blocks(layout, size):
    sizes = layout.axes.sizes
    small, idle = atoms(layout.dims[0], sizes)
    taken = take(small, size)
    assume(taken is not None)
    outer, rest = taken
    assert math.prod(f.size for f in outer) == size
    assert canonical([Factor(1, idle), *outer, *rest], sizes) == layout.dims[0]


@pytest.mark.parametrize(("sizes", "n"), [((2, 2), 12), ((3, 2), 12), ((2, 3), 30), ((7,), 72)])
def test_atoms_are_taken_exactly_where_some_way_to_write_the_dim_has_an_end(sizes, n):
    on = Axes(sizes)
    ends = defaultdict(lambda: {1})
    for (dim,) in every_writing(on, (n,)):
        ends[Layout(on, [dim])].update(itertools.accumulate((f.size for f in dim), mul))
    assert len(ends) > 10
    for layout, found in ends.items():
        small, _ = atoms(layout.dims[0], sizes)
        assert {size for size in divisors(n) if take(small, size) is not None} == found, layout
