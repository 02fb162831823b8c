import pytest

from shardwise import LayoutError
from shardwise.rules import Call, Slot
from shardwise.rules.notation import row
from shardwise.rules.table import TABLE
from shardwise.rules.tables.pointwise import pointwise


def call(*shapes, outputs, tensors=None, args=None):
    slots = tuple(Slot(i) for i in range(len(shapes))) if tensors is None else tensors
    return Call("aten.any.default", args or {}, slots, shapes, outputs, dtypes=("float32",) * len(shapes))


def test_letters_are_matched_with_arguments_in_order():
    rule = row("b m k, b k n -> b m n").build(call((2, 3, 4), (2, 4, 5), outputs=((2, 3, 5),)))
    assert rule.inputs == (("b", "m", "k"), ("b", "k", "n"))
    assert rule.outputs == (("b", "m", "n"),)
    assert dict(rule.reduced) == {"k": "sum"}


def test_leading_dims_are_counted_from_the_right():
    rule = row("… !d, !d -> … !d").build(call((2, 3, 4), (4,), outputs=((2, 3, 4),)))
    assert rule.inputs == (("…2", "…1", None), (None,))
    assert rule.outputs == (("…2", "…1", None),)


def test_a_letter_that_an_output_lacks_is_summed():
    rule = row("… d, … -> !v d").build(call((2, 3, 4), (2, 3), outputs=((9, 4),)))
    assert dict(rule.reduced) == {"…1": "sum", "…2": "sum"}


def test_an_omitted_argument_is_skipped():
    rule = row("… !d, !d, !d -> … !d").build(
        call((2, 4), (4,), outputs=((2, 4),), tensors=(Slot(0), None, Slot(1)))
    )
    assert rule.inputs == (("…1", None), (None,))


def test_a_call_with_another_number_of_dims_has_no_rule():
    assert row("m k, k n -> m n").build(call((2, 3, 4), (4, 5), outputs=((2, 3, 5),))) is None


def test_a_group_with_a_number_in_it_is_not_linear():
    add = pointwise(linear=[[0, 1]])
    assert add.build(call((2,), (2,), outputs=((2,),))).linear == (frozenset({0, 1}),)
    assert add.build(call((2,), outputs=((2,),), tensors=(Slot(0), 10))).linear == ()


def test_a_broadcast_dim_is_not_split():
    rule = pointwise().build(call((3, 1), (4,), outputs=((3, 4),)))
    assert rule.inputs == (("d0", None), ("d1",))


def test_a_text_without_an_arrow_is_an_error():
    with pytest.raises(LayoutError, match="has no ->"):
        row("m k, k n")


def test_one_letter_for_two_sizes_is_an_error():
    with pytest.raises(
        LayoutError, match=r"(?s)does not fit.*why: k is a dim of size 3 and one of size 2.*fix: "
    ):
        row("m k, k n -> m n").build(call((4, 2), (3, 5), outputs=((4, 5),)))


def test_an_output_that_the_row_lacks_is_an_error():
    with pytest.raises(
        LayoutError, match=r"(?s)does not fit.*why: The row has 1 of the call's 2 outputs.*fix: "
    ):
        row("m n -> m n").build(call((4, 2), outputs=((4, 2), (4,))))


def test_a_pending_max_is_not_cast_to_complex_numbers():
    cast = TABLE["aten._to_copy.default"]
    assert cast.build(call((2,), outputs=((2,),), args={"dtype": "torch.float64"})).monotone
    assert not cast.build(call((2,), outputs=((2,),), args={"dtype": "torch.complex64"})).monotone


def test_negation_of_integers_is_not_decreasing():
    negate = TABLE["aten.neg.default"]
    assert negate.build(call((2,), outputs=((2,),))).monotone == {"max": "min", "min": "max"}
    integers = Call("aten.neg.default", {}, (Slot(0),), ((2,),), ((2,),), dtypes=("int32",))
    assert negate.build(integers).monotone == {}
    assert negate.build(integers).linear
