"""The counts of elements equal those computed from what every rank owns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, coords, layouts, many, shapes

from shardwise.layout import Axes, Layout, Replicate, Shard, owned, parse_layout, refine
from shardwise.plan.traffic import elements_kept, elements_shared


def in_common(a, at, b, there):
    """The number of elements that the blocks of two coords have in common."""
    ours, theirs = owned(a, at), owned(b, there)
    return math.prod(len(set(i) & set(j)) for i, j in zip(ours, theirs, strict=True))


@many
@given(layouts())
def test_elements_kept_is_the_size_of_all_blocks(layout):
    total = sum(math.prod(map(len, owned(layout, coord))) for coord in coords(layout.axes))
    assert elements_kept(layout) == total


@many
@given(st.data())
def test_elements_shared_is_what_each_rank_owns_in_both_layouts(data):
    on, shape = data.draw(axes(max_count=12)), data.draw(shapes(max_dims=3))
    plain = data.draw(st.booleans())
    source, target = (data.draw(layouts(on, shape, plain=plain)) for _ in range(2))
    found = elements_shared(source, target)
    if refine(source, target) is None:
        assert found == 0  # without a common refinement the number is not computed, and no step is planned
    else:
        assert found == sum(in_common(source, c, target, c) for c in coords(on))


@given(layouts())
def test_a_layout_shares_everything_with_itself(layout):
    assert elements_shared(layout, layout) == elements_kept(layout)


@pytest.mark.parametrize(
    ("source", "target", "shared"),
    [
        ("[5:dp, 3]", "[5, 3]", 8 * 15 / 2),  # each of the four positions on tp holds the tensor once
        ("[5:dp, 3]", "[5, 3:dp]", 4 * (3 * 2 + 2 * 1)),  # dp=0 keeps 3x2 of its rows, dp=1 2x1
        (
            "[5:dp, 3]",
            "[5:tp, 3]",
            3 * (2 + 1) + 3 * (1 + 1),
        ),  # rows 0-2 and 3-4 intersect 0-1, 2-3, 4 and none
        ("[5:dp,tp, 3]", "[5:tp,dp, 3]", 3),  # only the first row stays
        ("[6]", "[6]", 48),
        ("[]", "[]", 8),
    ],
)
def test_examples_computed_by_hand(source, target, shared):
    on = Axes((2, 4), ("dp", "tp"))
    a, b = (parse_layout(text, on)[0] for text in (source, target))
    assert elements_shared(a, b) == shared


def test_counting_does_not_iterate_over_ranks():
    on = Axes((64, 64, 64, 64))
    a = Layout.of((10_000, 10_000), on, [Shard(0), Shard(1), Replicate(), Shard(0)])
    assert elements_kept(a) == 64 * 10_000**2
    assert elements_shared(a, a) == elements_kept(a)
