import copy
import itertools
import pickle

import pytest
from hypothesis import assume, given
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


def parse(text):
    return parse_layout(text, ON)[0]


@many
@given(layouts())
def test_placements_determine_the_layout(layout):
    assert len(layout.placements) == len(layout.axes)
    assert Layout.of(layout.shape, layout.axes, layout.placements) is layout


@many
@given(st.data())
def test_plain_placements_are_kept(data):
    on, shape = data.draw(axes()), data.draw(shapes())
    given_placements = data.draw(placements(on, len(shape)))
    layout = Layout.of(shape, on, given_placements)
    for size, before, after in zip(on.sizes, given_placements, layout.placements, strict=True):
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


def test_layouts_with_other_axes_shapes_or_reductions_differ():
    different = [
        *(Layout.of((8,), ON, p) for p in itertools.product([Shard(0), Partial(), Replicate()], repeat=2)),
        *(Layout.of((8,), ON, [Partial(op), Replicate()]) for op in REDUCE_OPS if op != "sum"),
        Layout.of((9,), ON, [Shard(0), Replicate()]),
        Layout.of((8, 1), ON, [Shard(0), Replicate()]),
        Layout.of((8,), Axes((2, 3)), [Shard(0), Replicate()]),
        Layout.of((8,), Axes((2, 4), ("dp", "tp")), [Shard(0), Replicate()]),
    ]
    assert len(set(different)) == len(different)


def test_a_layout_cannot_be_changed():
    layout = parse("[8:dp, 6]")
    for name in ("axes", "dims", "partial", "shape", "other"):
        with pytest.raises(AttributeError):
            setattr(layout, name, ())
        with pytest.raises(AttributeError):
            delattr(layout, name)
    assert repr(layout) == "[8:dp, 6]"


@given(axes(), shapes())
def test_replicated_blocks_are_the_full_tensor(on, shape):
    layout = Layout.replicated(shape, on)
    assert layout is Layout.of(shape, on, [Replicate()] * len(on))
    assert {block_shape(layout, coord) for coord in coords(on)} == {shape}


@given(layouts(), st.data())
def test_without_replicates_the_given_axes_and_keeps_the_others(layout, data):
    drop = data.draw(st.sets(st.sampled_from(range(len(layout.axes)))))
    left = layout.without(drop)
    assert left.shape == layout.shape
    assert left.sharded == layout.sharded - drop
    assert dict(left.partial) == {a: op for a, op in layout.partial if a not in drop}
    assert all(left.placements[a] == Replicate() for a in drop)
    assert layout.without(()) is layout


@given(layouts(plain=True), st.data())
def test_without_replaces_plain_shards_with_replicate(layout, data):
    drop = data.draw(st.sets(st.sampled_from(range(len(layout.axes)))))
    expected = [Replicate() if a in drop else p for a, p in enumerate(layout.placements)]
    assert layout.without(drop) is Layout.of(layout.shape, layout.axes, expected)


@given(layouts(partial=False), st.data())
def test_without_the_last_axis_of_a_factor_joins_its_blocks(layout, data):
    ends = [f.axes[-1] for dim in layout.dims for f in dim if f.axes]
    assume(ends)
    axis = data.draw(st.sampled_from(ends))
    left = layout.without([axis])
    for coord in coords(layout.axes):
        line = [(*coord[:axis], c, *coord[axis + 1 :]) for c in range(layout.axes.sizes[axis])]
        for d in range(layout.ndim):
            joined = {i for c in line for i in owned(layout, c)[d]}
            assert sorted(joined) == list(owned(left, coord)[d])


def test_dims_and_pending_reductions_can_be_replaced():
    layout = parse("[8:dp, 6] P(tp,sum)")
    assert layout.with_dim(0, Factor(8)) is parse("[8, 6] P(tp,sum)")
    assert layout.with_dim(1, Factor(9)) is parse("[8:dp, 9] P(tp,sum)")
    assert layout.with_dims([[Factor(5, (0,))]]) is parse("[5:dp] P(tp,sum)")
    assert layout.with_partial({}) is parse("[8:dp, 6]")
    assert layout.with_partial({1: "max"}) is parse("[8:dp, 6] P(tp,max)")


def test_a_plain_shard_beside_a_factored_one_splits_the_outermost_factor():
    mixed = [Shard(0), Shard(0, factors=(4, 6), factor=1)]
    assert Layout.of((24,), ON, mixed) is parse("[4:dp 6:tp]")
    mixed = [Shard(0, factors=(5, 6), factor=0), Shard(0)]
    assert Layout.of((30,), ON, mixed) is parse("[5:dp,tp 6]")


def test_order_determines_which_axis_is_outermost():
    assert Layout.of((8,), ON, [Shard(0, order=1), Shard(0, order=0)]) is parse("[8:tp,dp]")
    assert Layout.of((8,), ON, [Shard(0, order=0), Shard(0, order=1)]) is parse("[8:dp,tp]")
    assert parse("[8:tp,dp]").placements == (Shard(0, order=1), Shard(0, order=0))


WRONG = [
    # a call, and what its error must mention
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


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_an_invalid_layout_is_an_error_with_reason_and_fix(call, words):
    with pytest.raises(LayoutError) as caught:
        call()
    text = str(caught.value)
    assert "\n  why: " in text
    assert "\n  fix: " in text
    assert all(word in text for word in words), text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


def test_sum_and_avg_may_be_mixed():
    assert repr(Layout.of((8,), ON, [Partial("sum"), Partial("avg")])) == "[8] P(dp,sum) P(tp,avg)"


@pytest.mark.parametrize("wrong", ["S(0)", 0, None, Shard])
def test_only_placements_are_placements(wrong):
    with pytest.raises(TypeError, match=r"(?s)Axis tp.*why: .*fix: "):
        Layout.of((8,), ON, [Replicate(), wrong])
