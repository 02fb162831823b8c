import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import (
    axes,
    block_of,
    coords,
    counting,
    every_factoring,
    every_writing,
    layouts,
    many,
    regroupings,
    shapes,
)

from shardwise.layout import Axes, Layout, LayoutError, block_shape, owned, parse_layout, view

small = shapes(max_dims=3, max_size=12)


def elements(layout):
    """The elements that each coord holds, in memory order."""
    dense = counting(layout.shape)
    return tuple(tuple(block_of(dense, owned(layout, c)).ravel().tolist()) for c in coords(layout.axes))


def try_view(layout, shape):
    """The view, or None after a check of the error."""
    try:
        return view(layout, shape)
    except LayoutError as error:
        refusal = error
    assert f"view{shape}" in refusal.what
    assert repr(layout) in refusal.what
    assert "blocks" in refusal.why
    assert "redistribute(" in refusal.fix
    return None


@many
@given(st.data())
def test_a_block_of_the_view_is_the_view_of_the_block(data):
    layout = data.draw(layouts(data.draw(axes(max_count=24)), data.draw(small)))
    shape = data.draw(regroupings(layout.shape))
    new = try_view(layout, shape)
    if new is None:
        assert layout.sharded
        return
    assert new.shape == shape
    assert new.partial == layout.partial
    dense = counting(layout.shape)
    for coord in coords(layout.axes):
        block = block_of(dense, owned(layout, coord))
        expected = block_of(dense.reshape(shape), owned(new, coord))
        assert np.array_equal(block.reshape(block_shape(new, coord)), expected)


@given(layouts())
def test_a_view_with_the_same_shape_is_the_same_layout(layout):
    assert view(layout, layout.shape) is layout
    assert view(layout, list(layout.shape)) is layout


@many
@given(st.data())
def test_a_view_and_its_inverse_restore_the_blocks(data):
    layout = data.draw(layouts(data.draw(axes(max_count=24)), data.draw(shapes(min_size=1, max_dims=3))))
    new = try_view(layout, data.draw(regroupings(layout.shape)))
    assume(new is not None)
    back = try_view(new, layout.shape)
    assert back is not None
    assert elements(back) == elements(layout)
    # An axis on which only coord 0 owns anything may be attached to any dim.
    idle = [
        a
        for a in layout.sharded
        if all(c[a] == 0 or 0 in block_shape(layout, c) for c in coords(layout.axes))
    ]
    assert back is layout or idle


@given(st.data())
def test_dims_of_size_1_can_always_be_inserted_and_removed(data):
    layout = data.draw(layouts(shape=data.draw(shapes(min_size=1))))
    at = data.draw(st.integers(0, layout.ndim))
    wider = view(layout, (*layout.shape[:at], 1, *layout.shape[at:]))
    assert elements(wider) == elements(layout)
    back = try_view(wider, layout.shape)
    assert back is not None
    assert elements(back) == elements(layout)


def _shapes_of(n):
    """All shapes of `n` elements with at most one dim of size 1."""
    for shape in every_factoring(n):
        yield shape
        yield from ((*shape[:i], 1, *shape[i:]) for i in range(len(shape) + 1))


@pytest.mark.parametrize(
    ("sizes", "n"),
    [
        ((2,), 4),
        ((2,), 12),
        ((3,), 6),
        ((3,), 10),
        ((3,), 12),
        ((5,), 18),
        ((2, 2), 4),
        ((3, 2), 6),
        ((2, 3), 8),
    ],
)
def test_a_view_is_found_wherever_one_exists(sizes, n):
    on = Axes(sizes)
    every = sorted({s for s in _shapes_of(n) if len(s) <= 3})
    by_elements = defaultdict(lambda: defaultdict(set))
    for shape in every:
        for layout in {Layout(on, writing) for writing in every_writing(on, shape)}:
            by_elements[elements(layout)][shape].add(layout)
    for same in by_elements.values():
        for layout, shape in itertools.product(itertools.chain(*same.values()), every):
            new = try_view(layout, shape)
            assert new in same[shape] if shape in same else new is None, (layout, shape, new)


@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        ("[4, 6:tp]", (24,), "[4 6:tp]"),
        ("[4 6:tp]", (2, 2, 6), "[2, 2, 6:tp]"),
        ("[4:tp, 6]", (24,), "[24:tp]"),
        ("[3:tp, 4]", (12,), "[3:tp 4]"),
        ("[3:tp 4]", (3, 2, 2), "[3:tp, 2, 2]"),
        ("[24:dp,tp]", (4, 6), "[4:dp,tp, 6]"),
        ("[24:dp,tp]", (2, 12), "[2:dp, 12:tp]"),
        ("[2:dp, 12:tp]", (24,), "[24:dp,tp]"),
        ("[8:dp, 1, 6]", (8, 6), "[8:dp, 6]"),
        ("[8, 1:dp]", (8,), "[1:dp 8]"),
        ("[1:dp 8]", (8, 1), "[8, 1:dp]"),
        ("[8:dp] P(tp,max)", (2, 4), "[2:dp, 4] P(tp,max)"),
        ("[]", (1, 1), "[1, 1]"),
        ("[1, 1]", (), "[]"),
        ("[0:dp, 4]", (2, 0, 3), "[2, 0, 3]"),
    ],
)
def test_examples_of_views(before, shape, after):
    on = Axes((2, 2), ("dp", "tp"))
    assert repr(view(parse_layout(before, on)[0], shape)) == after


@pytest.mark.parametrize(
    ("before", "shape", "names", "blocks"),
    [
        ("[10:tp]", (5, 2), "tp", "(3, 3, 3, 1)"),
        ("[3:dp, 8]", (2, 12), "dp", "(2, 1)"),
        ("[6 4:tp]", (4, 6), "tp", "(1, 1, 1, 1)"),
        ("[12:dp 4:tp]", (8, 6), "tp", "(1, 1, 1, 1)"),
        ("[9:dp,tp]", (3, 3), "dp,tp", "(2, 2, 1, 0, 1, 1, 1, 1)"),
        ("[1:dp]", (), "dp", "(1, 0)"),
    ],
)
def test_the_error_for_a_view_that_divides_blocks_names_axes_and_blocks(before, shape, names, blocks):
    layout = parse_layout(before, Axes((2, 4), ("dp", "tp")))[0]
    with pytest.raises(LayoutError) as caught:
        view(layout, shape)
    assert caught.value.what == f"view{shape} cannot keep {before} on {names}."
    assert f"{names}'s blocks {blocks}" in caught.value.why
    for name in names.split(","):
        assert f"{name}=Replicate()" in caught.value.fix


@given(layouts(shape=(6, 4)), small)
def test_a_view_with_another_number_of_elements_is_an_error(layout, shape):
    assume(math.prod(shape) != 24)
    with pytest.raises(LayoutError, match=r"(?s)another number of elements.*why: .*24.*fix: "):
        view(layout, shape)
