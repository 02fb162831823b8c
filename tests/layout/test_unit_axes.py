from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, many, placements, shapes

from shardwise.layout import Axes, Layout, Shard, Spec, unit_placements


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
