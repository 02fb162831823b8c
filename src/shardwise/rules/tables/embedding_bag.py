"""Embedding bags: the width of the table may be split, its rows and the bags may not."""

from __future__ import annotations

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import Letters, letters_by_name, unsplit
from shardwise.rules.notation import groups_of
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS"]

_MAX = 2  # torch's number of the mode
_WIDE: Letters = (None, "d")


def _contiguous(call: Call, place: Place) -> Local | None:
    """The op on contiguous blocks: by the strides of the table the kernel decides whether `offset2bag` has elements, and
    blocks of one column have other strides than those of several.
    """
    if "d" not in place.sharded:
        return None
    table: Step = ("blocks.contiguous", (Slot(0),), {})
    return Local((table, call.step(weight=Out(0))))


def _forward(call: Call) -> Rule | None:
    is_max = call.args["mode"] == _MAX
    _, offset2bag, bag_size, max_indices = unsplit(call.outputs)
    return Rule(
        letters_by_name(call, {"weight": _WIDE}),
        (_WIDE, offset2bag, bag_size, _WIDE if is_max else max_indices),
        linear=() if is_max else groups_of(call, [[0], [3]]),
        empty=is_max,  # the kernels of the other modes reject a table of width 0
        local=_contiguous,
        alike=frozenset({1, 2} if is_max else {1, 2, 3}),  # these depend on the indices only
    )


def _backward(call: Call) -> Rule | None:
    if call.args.get("sparse", False):
        return None
    inputs = letters_by_name(call, {"grad": _WIDE, "maximum_indices": _WIDE})
    return Rule(inputs, (_WIDE,), linear=groups_of(call, [[0]]))


def _weights_backward(call: Call) -> Rule | None:
    inputs = letters_by_name(call, {"grad": _WIDE, "weight": _WIDE})
    return Rule(inputs, ((None,),), {"d": "sum"}, linear=groups_of(call, [[0], [1]]))


_FORWARD = Row("!v d, *, *, * -> !b d, *, *, *; linear in (0) and in (3) unless mode is max", _forward)
_BACKWARD = Row("grad: !b d, maximum_indices: !b d -> !v d; linear in (0)", _backward)

ROWS: dict[str, Row] = {
    "aten._embedding_bag.default": _FORWARD,
    "aten._embedding_bag_forward_only.default": _FORWARD,
    "aten._embedding_bag_backward.default": _BACKWARD,
    "aten._embedding_bag_dense_backward.default": _BACKWARD,
    "aten._embedding_bag_per_sample_weights_backward.default": Row(
        "!b d, !v d, *, *, * -> *; d by sum; linear in (0) and in (1)", _weights_backward
    ),
}
