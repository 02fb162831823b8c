from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, layouts, many, placements, shapes

from shardwise.layout import Axes, Factor, Layout, Replicate, Shard, Spec, StridedShard, unit_placements
from shardwise.layout.unit_axes import shown_placements


@many
@given(st.data())
def test_a_spec_gives_back_placements_on_axes_of_size_one_and_its_layout_is_the_same(data):
    on = data.draw(axes())
    shape = data.draw(shapes())
    given_placements = data.draw(placements(on, len(shape)))
    layout = Layout.of(shape, on, given_placements)
    units = unit_placements(layout, given_placements)
    spec = Spec(None, layout, "float32", shape, (1,) * len(shape), units)
    assert Layout.of(shape, on, spec.placements) is layout
    for size, got, want in zip(on.sizes, spec.placements, given_placements, strict=True):
        if size == 1:
            assert got == want or (got.is_shard() and got.dim == want.dim % len(shape))


def test_without_axes_of_size_one_there_is_nothing_to_remember():
    layout = Layout.of((4,), Axes((2, 2)), (Shard(0), Shard(0)))
    assert unit_placements(layout, (Shard(0), Shard(0))) == ()


@many
@given(st.data())
def test_the_placements_that_a_spec_shows_are_those_of_its_layout(data):
    layout = data.draw(layouts())
    spec = Spec(None, layout, "float32", layout.shape, (1,) * layout.ndim)
    assert Layout.of(layout.shape, layout.axes, spec.placements) is layout


def test_a_split_inner_factor_is_written_as_in_torch():
    line = Axes((3,))
    assert shown_placements(Layout(line, [(Factor(4), Factor(5, (0,)))])) == (
        StridedShard(0, split_factor=4),
    )
    square = Axes((2, 3))
    both = Layout(square, [(Factor(4, (0,)), Factor(5, (1,)))])
    assert shown_placements(both) == (Shard(0), StridedShard(0, split_factor=2))
    inner = Layout(square, [(Factor(4), Factor(5, (1,))), (Factor(6, (0,)),)])
    assert shown_placements(inner) == (Shard(1), StridedShard(0, split_factor=4))


def test_what_torch_has_no_placement_for_shows_its_factors():
    uneven = Layout(Axes((3,)), [(Factor(4, (0,)), Factor(5))])
    assert shown_placements(uneven) == (Shard(0, factors=(4, 5), factor=0),)
    assert shown_placements(Layout.replicated((4,), Axes((3,)))) == (Replicate(),)
