import copy
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import axes, coords, layouts, many, placements, shapes

from shardwise.layout import (
    REDUCE_OPS,
    Axes,
    Factor,
    Layout,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    block_shape,
    owned,
    parse_layout,
)

ON = Axes((2, 3), ("dp", "tp"))


def read(text):
    return parse_layout(text, ON)[0]


@many
@given(layouts())
def test_placements_say_all_there_is_to_a_layout(layout):
    assert len(layout.placements) == len(layout.axes)
    assert Layout.of(layout.shape, layout.axes, layout.placements) is layout


@many
@given(st.data())
def test_plain_placements_come_back_as_they_went_in(data):
    on, shape = data.draw(axes()), data.draw(shapes())
    said = data.draw(placements(on, len(shape)))
    for size, before, after in zip(on.sizes, said, Layout.of(shape, on, said).placements, strict=True):
        match before:
            case _ if size == 1:
                assert after == Replicate()
            case Shard(dim):
                assert after == Shard(dim % len(shape))
                assert after.is_plain
            case _:
                assert after == before


@given(layouts())
def test_an_axis_is_sharded_or_partial_or_replicates(layout):
    for axis, (size, placement) in enumerate(zip(layout.axes.sizes, layout.placements, strict=True)):
        assert placement.is_shard() == (axis in layout.sharded)
        assert placement.is_partial() == (axis in dict(layout.partial))
        assert size > 1 or placement.is_replicate()
        if placement.is_partial():
            assert placement.reduce_op == dict(layout.partial)[axis]
        if placement.is_shard():
            assert any(axis in f.axes for f in layout.dims[placement.dim])


@given(layouts())
def test_layouts_are_interned(layout):
    assert Layout(layout.axes, layout.dims, dict(layout.partial)) is layout
    assert copy.copy(layout) is layout
    assert copy.deepcopy({"a": [layout]})["a"][0] is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert layout.ndim == len(layout.shape) == len(layout.dims)


@given(layouts(), st.data())
def test_layouts_are_equal_only_to_themselves(layout, data):
    other = data.draw(layouts(layout.axes, layout.shape))
    assert (other == layout) == (other is layout) == (repr(other) == repr(layout))
    assert len({layout, other}) == 1 + (other is not layout)


def test_axes_and_shape_and_partial_tell_layouts_apart():
    few = [
        *(Layout.of((8,), ON, p) for p in itertools.product([Shard(0), Partial(), Replicate()], repeat=2)),
        *(Layout.of((8,), ON, [Partial(op), Replicate()]) for op in REDUCE_OPS if op != "sum"),
        Layout.of((9,), ON, [Shard(0), Replicate()]),
        Layout.of((8, 1), ON, [Shard(0), Replicate()]),
        Layout.of((8,), Axes((2, 3)), [Shard(0), Replicate()]),
        Layout.of((8,), Axes((2, 4), ("dp", "tp")), [Shard(0), Replicate()]),
    ]
    assert len(set(few)) == len(few)


def test_a_layout_cannot_be_changed():
    layout = read("[8:dp, 6]")
    for name in ("axes", "dims", "partial", "shape", "other"):
        with pytest.raises(AttributeError):
            setattr(layout, name, ())
        with pytest.raises(AttributeError):
            delattr(layout, name)
    assert repr(layout) == "[8:dp, 6]"


@given(axes(), shapes())
def test_replicated_is_whole_everywhere(on, shape):
    layout = Layout.replicated(shape, on)
    assert layout is Layout.of(shape, on, [Replicate()] * len(on))
    assert {block_shape(layout, coord) for coord in coords(on)} == {shape}


@given(layouts(), st.data())
def test_without_axes_the_others_stay(layout, data):
    gone = data.draw(st.sets(st.sampled_from(range(len(layout.axes)))))
    left = layout.without(gone)
    assert left.shape == layout.shape
    assert left.sharded == layout.sharded - gone
    assert dict(left.partial) == {a: op for a, op in layout.partial if a not in gone}
    assert all(left.placements[a] == Replicate() for a in gone)
    assert layout.without(()) is layout


@given(layouts(plain=True), st.data())
def test_without_is_replicate_in_the_place_of_a_plain_shard(layout, data):
    gone = data.draw(st.sets(st.sampled_from(range(len(layout.axes)))))
    said = [Replicate() if a in gone else p for a, p in enumerate(layout.placements)]
    assert layout.without(gone) is Layout.of(layout.shape, layout.axes, said)


@given(layouts(partial=False), st.data())
def test_without_a_factors_last_axis_its_blocks_are_joined(layout, data):
    ends = [f.axes[-1] for dim in layout.dims for f in dim if f.axes]
    if not ends:
        return
    axis = data.draw(st.sampled_from(ends))
    left = layout.without([axis])
    for coord in coords(layout.axes):
        line = [(*coord[:axis], c, *coord[axis + 1 :]) for c in range(layout.axes.sizes[axis])]
        for d in range(layout.ndim):
            joined = {i for c in line for i in owned(layout, c)[d]}
            assert sorted(joined) == list(owned(left, coord)[d])


def test_other_dims_or_other_partials():
    layout = read("[8:dp, 6] P(tp,sum)")
    assert layout.with_dim(0, Factor(8)) is read("[8, 6] P(tp,sum)")
    assert layout.with_dim(1, Factor(9)) is read("[8:dp, 9] P(tp,sum)")
    assert layout.with_dims([[Factor(5, (0,))]]) is read("[5:dp] P(tp,sum)")
    assert layout.with_partial({}) is read("[8:dp, 6]")
    assert layout.with_partial({1: "max"}) is read("[8:dp, 6] P(tp,max)")


def test_a_plain_shard_beside_a_factored_one_is_outermost():
    said = [Shard(0), Shard(0, factors=(4, 6), factor=1)]
    assert Layout.of((24,), ON, said) is read("[4:dp 6:tp]")
    said = [Shard(0, factors=(5, 6), factor=0), Shard(0)]
    assert Layout.of((30,), ON, said) is read("[5:dp,tp 6]")


def test_order_says_which_axis_is_outermost():
    assert Layout.of((8,), ON, [Shard(0, order=1), Shard(0, order=0)]) is read("[8:tp,dp]")
    assert Layout.of((8,), ON, [Shard(0, order=0), Shard(0, order=1)]) is read("[8:dp,tp]")
    assert read("[8:tp,dp]").placements == (Shard(0, order=1), Shard(0, order=0))


WRONG = [
    # what is asked for, and what the text must name
    (lambda: Layout.of((8, 6), ON, [Shard(0)]), ["same length", "dp=2, tp=3", "S(0)"]),
    (lambda: Layout.of((8, 6), ON, [Replicate()] * 3), ["3 for 2 axes"]),
    (lambda: Layout.of((8, 6), ON, [Shard(2), Replicate()]), ["Shard(2)", "dp", "2 dims", "-2..1"]),
    (lambda: Layout.of((8, 6), ON, [Replicate(), Shard(-3)]), ["Shard(-3)", "tp"]),
    (lambda: Layout.of((), ON, [Shard(0), Replicate()]), ["Replicate()"]),
    (lambda: Layout.of((8,), ON, [Partial("sum"), Partial("max")]), ["max, sum"]),
    (lambda: Layout.of((8,), ON, [Partial("avg"), Partial("product")]), ["avg, product"]),
    (lambda: Layout(ON, [[Factor(8)]], {0: "mean"}), ["mean", "sum, avg, max, min, product"]),
    (lambda: Layout(ON, [[Factor(8, (0,))], [Factor(6, (0,))]]), ["dp", "2 times"]),
    (lambda: Layout(ON, [[Factor(8, (1, 1))]]), ["tp", "2 times"]),
    (lambda: Layout(ON, [[Factor(8, (0,)), Factor(3, (0,))]]), ["dp"]),
    (lambda: Layout(ON, [[Factor(8, (0,))]], {0: "sum"}), ["dp"]),
    (lambda: Layout.of((24,), ON, [Replicate(), Shard(0, factors=(4, 5), factor=1)]), ["(4, 5)", "24", "tp"]),
    (
        lambda: Layout.of((24,), ON, [Shard(0, factors=(6, 4)), Shard(0, factors=(4, 6), factor=1)]),
        ["same factors", "dp", "tp"],
    ),
]


@pytest.mark.parametrize(("ask", "names"), WRONG)
def test_what_cannot_be_is_an_error_that_says_why_and_what_to_do(ask, names):
    with pytest.raises(LayoutError) as caught:
        ask()
    text = str(caught.value)
    assert "\n  why: " in text
    assert "\n  fix: " in text
    assert all(name in text for name in names), text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


def test_sum_and_avg_may_be_pending_together():
    assert repr(Layout.of((8,), ON, [Partial("sum"), Partial("avg")])) == "[8] P(dp,sum) P(tp,avg)"


@pytest.mark.parametrize("wrong", ["S(0)", 0, None, Shard])
def test_only_placements_are_placements(wrong):
    with pytest.raises(TypeError, match=r"(?s)axis tp.*why: .*fix: "):
        Layout.of((8,), ON, [Replicate(), wrong])
