import pytest

from shardwise import LayoutError
from shardwise.rules import Call, Slot
from shardwise.rules.notation import row
from shardwise.rules.table import TABLE
from shardwise.rules.tables.pointwise import pointwise


def call(*shapes, outputs, tensors=None, args=None):
    slots = tuple(Slot(i) for i in range(len(shapes))) if tensors is None else tensors
    return Call("aten.any.default", args or {}, slots, shapes, outputs, dtypes=("float32",) * len(shapes))


def test_letters_are_matched_by_argument():
    rule = row("b m k, b k n -> b m n").build(call((2, 3, 4), (2, 4, 5), outputs=((2, 3, 5),)))
    assert rule.inputs == (("b", "m", "k"), ("b", "k", "n"))
    assert rule.outputs == (("b", "m", "n"),)
    assert dict(rule.reduced) == {"k": "sum"}


def test_leading_dims_count_from_the_right():
    rule = row("… !d, !d -> … !d").build(call((2, 3, 4), (4,), outputs=((2, 3, 4),)))
    assert rule.inputs == (("…2", "…1", None), (None,))
    assert rule.outputs == (("…2", "…1", None),)


def test_a_letter_missing_in_one_output_is_pending_there():
    rule = row("… d, … -> !v d").build(call((2, 3, 4), (2, 3), outputs=((9, 4),)))
    assert dict(rule.reduced) == {"…1": "sum", "…2": "sum"}


def test_an_argument_that_is_left_out_is_skipped():
    rule = row("… !d, !d, !d -> … !d").build(
        call((2, 4), (4,), outputs=((2, 4),), tensors=(Slot(0), None, Slot(1)))
    )
    assert rule.inputs == (("…1", None), (None,))


def test_another_number_of_dims_has_no_rule():
    assert row("m k, k n -> m n").build(call((2, 3, 4), (4, 5), outputs=((2, 3, 5),))) is None


def test_a_group_with_a_number_in_it_is_not_linear():
    add = pointwise(linear=[[0, 1]])
    assert add.build(call((2,), (2,), outputs=((2,),))).linear == (frozenset({0, 1}),)
    assert add.build(call((2,), outputs=((2,),), tensors=(Slot(0), 10))).linear == ()


def test_what_is_broadcast_is_whole():
    rule = pointwise().build(call((3, 1), (4,), outputs=((3, 4),)))
    assert rule.inputs == (("d0", None), ("d1",))


def test_a_text_without_an_arrow_is_refused():
    with pytest.raises(LayoutError, match="has no ->"):
        row("m k, k n")


def test_an_extreme_that_is_pending_is_not_cast_to_complex_numbers():
    cast = TABLE["aten._to_copy.default"]
    assert cast.build(call((2,), outputs=((2,),), args={"dtype": "torch.float64"})).monotone
    assert not cast.build(call((2,), outputs=((2,),), args={"dtype": "torch.complex64"})).monotone


def test_minus_an_integer_is_in_no_order():
    minus = TABLE["aten.neg.default"]
    assert minus.build(call((2,), outputs=((2,),))).monotone == {"max": "min", "min": "max"}
    whole = Call("aten.neg.default", {}, (Slot(0),), ((2,),), ((2,),), dtypes=("int32",))
    assert minus.build(whole).monotone == {}
    assert minus.build(whole).linear
