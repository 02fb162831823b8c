import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import (
    axes,
    coords,
    cut_by_hand,
    divisors,
    every_writing,
    layouts,
    many,
    shapes,
    writings,
)

from shardwise.layout import Axes, Factor, Layout, cut, first_block, owned
from shardwise.layout.factor import atoms, canonical, split, take

parts = st.lists(st.integers(1, 4), max_size=3)


@given(st.integers(0, 50), parts)
def test_cuts_follow_each_other_from_end_to_end(size, parts):
    at = 0
    for coord in itertools.product(*(range(n) for n in parts)):
        low, high = cut(size, parts, coord)
        assert low == at <= high
        at = high
    assert at == size


@given(st.integers(0, 50), parts)
def test_no_block_is_larger_than_the_first(size, parts):
    blocks = [cut(size, parts, coord) for coord in itertools.product(*(range(n) for n in parts))]
    assert first_block(size, parts) == max(high - low for low, high in blocks) == blocks[0][1]


@many
@given(st.data())
def test_the_canonical_form_means_what_was_written(data):
    on, shape = data.draw(axes()), data.draw(shapes())
    writing = data.draw(writings(on, shape))
    layout = Layout(on, writing)
    assert layout.shape == shape
    for coord in coords(on):
        assert tuple(map(tuple, owned(layout, coord))) == cut_by_hand(writing, on, coord)


@given(layouts())
def test_the_canonical_form_is_its_own(layout):
    for dim in layout.dims:
        assert canonical(dim, layout.axes.sizes) == dim


def _rewritings(dim, on):
    """The ways to split one factor of a dim, or to put in a factor of size 1, that cut as before."""
    before = [cut_by_hand([dim], on, coord) for coord in coords(on)]
    for i, f in enumerate(dim):
        for outer in divisors(f.size):
            for k in range(len(f.axes) + 1):
                new = [
                    *dim[:i],
                    Factor(outer, f.axes[:k]),
                    Factor(f.size // outer, f.axes[k:]),
                    *dim[i + 1 :],
                ]
                if [cut_by_hand([new], on, coord) for coord in coords(on)] == before:
                    yield new


@given(st.data())
def test_however_it_is_written_a_layout_is_one_object(data):
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
def test_layouts_that_own_the_same_are_the_same(sizes, largest):
    on = Axes(sizes)
    for n in range(1, largest + 1):
        found = defaultdict(set)
        for writing in every_writing(on, (n,)):
            layout = Layout(on, writing)
            mine = tuple(cut_by_hand(writing, on, coord) for coord in coords(on))
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
        # as far as an uneven cut can grow: 4, 4, 2 is 10 over 3, but 8, 8, 4 is not how 20 is cut
        ([Factor(5, (1,)), Factor(4)], [Factor(10, (1,)), Factor(2)]),
        # and the most it can grow, from wherever it starts: 13 over 7 takes in less than 7
        ([Factor(13, (3,)), Factor(12)], [Factor(78, (3,)), Factor(2)]),
        ([Factor(52, (3,)), Factor(3)], [Factor(78, (3,)), Factor(2)]),
        # an axis of size 1 cuts nothing
        ([Factor(4, (2,)), Factor(6, (0,))], [Factor(4), Factor(6, (0,))]),
        # where every block has one element, the next axis only says that its first coord has it
        ([Factor(2, (0, 1))], [Factor(2, (0, 1))]),
        ([Factor(1, (1,)), Factor(2, (0,))], [Factor(2, (0, 1))]),
        ([Factor(3), Factor(1, (1,)), Factor(2)], [Factor(1, (1,)), Factor(6)]),
        ([Factor(1, (1, 0))], [Factor(1, (0, 1))]),
        ([Factor(1)], []),
        ([Factor(3, (0,)), Factor(0), Factor(2, (1,))], [Factor(0, (0, 1))]),
    ],
)
def test_some_canonical_forms(written, form):
    assert canonical(written, (2, 3, 1, 7)) == tuple(form)


@given(layouts(shape=(12, 36, 30)), st.data())
def test_a_split_factor_cuts_as_the_whole_did(layout, data):
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
    alike = [
        all(cut_by_hand([way], on, coord) == cut_by_hand([[f]], on, coord) for coord in coords(on))
        for way in ways
    ]
    assert any(alike) == (halves is not None)


@pytest.mark.parametrize("outer", [0, 5, 7, 25])
def test_a_factor_splits_only_by_a_divisor(outer):
    assert split(Factor(24), outer, ()) is None


@many
@given(layouts(shape=(24, 13)))
def test_atoms_cut_as_the_dim_and_do_not_split(layout):
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
def test_what_is_taken_and_what_is_left_make_up_the_atoms(layout, size):
    sizes = layout.axes.sizes
    small, idle = atoms(layout.dims[0], sizes)
    taken = take(small, size)
    if taken is None:
        assert layout.sharded
    else:
        outer, rest = taken
        assert math.prod(f.size for f in outer) == size
        assert canonical([Factor(1, idle), *outer, *rest], sizes) == layout.dims[0]
