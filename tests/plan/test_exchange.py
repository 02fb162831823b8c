"""The elements that an exchange counts are those that ranks want and do not own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, coords, shapes

from shardwise.layout import Axes, Factor, Layout, block_shape, parse_layout
from shardwise.plan import CostModel, Move, plan_exchanges
from shardwise.plan.exchange import chunked, overlaps, place_of


@st.composite
def halos(draw, on=None):
    """A layout with plainly split dims, and moves along them to any ranges, overlapping or not."""
    on = draw(axes(max_count=12)) if on is None else on
    shape = draw(shapes(max_dims=3).filter(bool))
    on_dims: list[list[int]] = [[] for _ in shape]
    for a in draw(st.permutations(range(len(on)))):
        if on.sizes[a] > 1 and draw(st.integers(0, 3)):
            draw(st.sampled_from(on_dims)).append(a)
    layout = Layout(on, [(Factor(n, tuple(x)),) for n, x in zip(shape, on_dims, strict=True)])
    moves = []
    for d, n in enumerate(shape):
        if draw(st.booleans()):
            splitting = tuple(a for f in layout.dims[d] for a in f.axes)
            owned = tuple((r,) for r in chunked(n, splitting, on))
            ends = st.lists(st.integers(0, n), min_size=2, max_size=2).map(sorted).map(tuple)
            wanted = tuple(tuple(draw(st.lists(ends, max_size=2))) for _ in owned)
            moves.append(Move(d, splitting, owned, wanted))
    return layout, moves


@given(halos())
def test_the_elements_are_those_that_ranks_want_and_do_not_own(case):
    layout, moves = case
    on = layout.axes
    plan = plan_exchanges(layout, moves, 4)
    shape = {c: list(block_shape(layout, c)) for c in coords(on)}
    total = 0
    for dim, splitting, owned, wanted in moves:
        for c in coords(on):
            position = place_of(c, splitting, on)
            has = {i for low, high in owned[position] for i in range(low, high)}
            wants = [i for low, high in wanted[position] for i in range(low, high)]
            width = math.prod(n for d, n in enumerate(shape[c]) if d != dim)
            total += width * sum(i not in has for i in wants)
            shape[c][dim] = len(wants)
    assert plan.bytes == 4 * total
    assert plan.collectives <= len(moves)
    for c in coords(on):
        if plan.steps:
            assert plan.steps[-1].shape_at(c) == tuple(shape[c])


def test_overlaps_are_in_the_order_of_the_receiver():
    # a roll by two: the block has [6, 8) and [0, 2), and a rank wants [0, 7)
    assert overlaps(((6, 8), (0, 2)), ((0, 7),)) == [(2, 0, 2), (0, 6, 1)]
    assert overlaps(((0, 3),), ()) == []


def test_moves_without_effect_are_omitted_and_local_moves_are_free():
    layout = parse_layout("[8:tp, 2]", Axes((4,), ("tp",)))[0]
    owned = tuple((r,) for r in chunked(8, (0,), layout.axes))
    assert plan_exchanges(layout, [Move(0, (0,), owned, owned)], 4).steps == ()
    first = tuple(((low, low + 1),) for ((low, _),) in owned)
    plan = plan_exchanges(layout, [Move(0, (0,), owned, first)], 4)
    assert plan.collectives == 0
    assert CostModel().seconds(plan.steps[0], 4) == 0.0


@pytest.mark.parametrize("halo", [1, 2, 5])
def test_a_halo_exchange_sends_the_borders(halo):
    layout = parse_layout("[64:tp, 100]", Axes((4,), ("tp",)))[0]
    owned = chunked(64, (0,), layout.axes)
    wanted = tuple(((max(a - halo, 0), min(b + halo, 64)),) for a, b in owned)
    plan = plan_exchanges(layout, [Move(0, (0,), tuple((r,) for r in owned), wanted)], 4)
    assert plan.bytes == 4 * 100 * halo * 6  # three borders, in both directions
