"""Choosing layouts for an op: the cheapest that its rule allows."""

import time

import pytest

from shardwise.layout import Axes, parse_layout
from shardwise.plan import choose, choose_view
from shardwise.rules import Call, Slot
from shardwise.rules.table import TABLE

AXES = Axes((2, 2), ("dp", "tp"))


def choices(op, *texts, outputs, axes=AXES, fixed=(), **args):
    layouts = [parse_layout(t, axes)[0] for t in texts]
    slots = tuple(Slot(i) for i in range(len(layouts)))
    shapes = tuple(x.shape for x in layouts)
    call = Call(op, args, slots, shapes, outputs, dtypes=("float32",) * len(layouts))
    choice = choose(
        TABLE[op].build(call),
        layouts,
        outputs,
        [4] * len(layouts),
        [parse_layout(t, axes)[0] for t in fixed],
    )
    return None if choice is None else ([str(x) for x in choice.inputs], [str(x) for x in choice.outputs])


@pytest.mark.parametrize(
    ("texts", "inputs", "output"),
    [
        (("[8:dp, 6]", "[6, 4:tp]"), ["[8:dp, 6]", "[6, 4:tp]"], "[8:dp, 4:tp]"),
        (("[8, 6:tp]", "[6:tp, 4]"), ["[8, 6:tp]", "[6:tp, 4]"], "[8, 4] P(tp,sum)"),
        (("[8:dp, 6] P(tp,sum)", "[6, 4]"), ["[8:dp, 6] P(tp,sum)", "[6, 4]"], "[8:dp, 4] P(tp,sum)"),
        (("[8, 6:tp]", "[6, 4]"), ["[8, 6:tp]", "[6:tp, 4]"], "[8, 4] P(tp,sum)"),
        (("[2 4:tp, 6]", "[6, 4:dp]"), ["[2 4:tp, 6]", "[6, 4:dp]"], "[2 4:tp, 4:dp]"),
        (("[8, 6]", "[6, 4]"), ["[8, 6]", "[6, 4]"], "[8, 4]"),
    ],
)
def test_a_matrix_product(texts, inputs, output):
    assert choices("aten.mm.default", *texts, outputs=((8, 4),)) == (inputs, [output])


def test_a_pending_sum_passes_an_addition_only_if_both_operands_are_pending():
    inputs, outputs = choices("aten.add.Tensor", "[4] P(tp,sum)", "[4]", outputs=((4,),))
    assert inputs == ["[4] P(tp,sum)", "[4] P(tp,sum)"]
    assert outputs == ["[4] P(tp,sum)"]


def test_replicated_operands_stay_replicated():
    assert choices("aten.add.Tensor", "[4]", "[4]", outputs=((4,),)) == (["[4]", "[4]"], ["[4]"])


def test_an_in_place_target_keeps_its_layout():
    inputs, outputs = choices("aten.add.Tensor", "[4]", "[4:tp]", outputs=((4,),), fixed=["[4]"])
    assert inputs == ["[4]", "[4]"]
    assert outputs == ["[4]"]


def test_a_view_gathers_only_the_axis_that_it_cannot_keep():
    choice = choose_view(parse_layout("[4:dp, 6:tp]", AXES)[0], (4, 3, 2), 4)
    assert str(choice.outputs[0]) == "[4:dp, 3, 2]"
    choice = choose_view(parse_layout("[10:tp, 4:dp]", Axes((2, 4), ("dp", "tp")))[0], (5, 2, 4), 4)
    assert str(choice.outputs[0]) == "[5, 2, 4:dp]"


def test_a_choice_on_four_axes_takes_milliseconds():
    axes = Axes((4, 4, 4, 4), ("a", "b", "c", "d"))
    best = min(
        _seconds(
            lambda: choices(
                "aten.mm.default", "[64:a,b, 64:c]", "[64:c, 64:d]", outputs=((64, 64),), axes=axes
            )
        )
        for _ in range(5)
    )
    assert best < 0.005


def _seconds(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
