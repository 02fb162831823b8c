"""Bags of embeddings: the width of the table passes through, its rows and the bags are whole."""

from __future__ import annotations

from shardwise.rules.call import Call, Slot
from shardwise.rules.notation import groups_of
from shardwise.rules.rule import Letters, Row, Rule

__all__ = ["ROWS"]

_MAX = 2  # torch's number for the mode that takes the largest


def _wide(call: Call, names: tuple[str, ...]) -> tuple[Letters, ...]:
    """Letters of a call: the named arguments have the width as their last of two dims, the others are whole."""
    out: list[Letters] = [(None,) * len(s) for s in call.shapes]
    for name in names:
        value = call.args.get(name)
        if isinstance(value, Slot) and len(call.shapes[value.number]) == 2:
            out[value.number] = (None, "d")
    return tuple(out)


def _forward() -> Row:
    def build(call: Call) -> Rule | None:
        largest = call.args["mode"] == _MAX
        chosen: Letters = (None, "d") if largest else (None,) * len(call.outputs[3])
        # which bag an index is in, and how many a bag has, follow from the indices alone
        alike = frozenset({1, 2} if largest else {1, 2, 3})
        return Rule(
            _wide(call, ("weight",)),
            ((None, "d"), (None,) * len(call.outputs[1]), (None,) * len(call.outputs[2]), chosen),
            linear=() if largest else groups_of(call, [[0], [3]]),
            empty=largest,  # the other kernels take no table without width
            alike=alike,
        )

    return Row("!v d, *, *, * -> !b d, *, *, *; linear in (0) and in (3) but for max", build)


def _backward() -> Row:
    def build(call: Call) -> Rule | None:
        if call.args.get("sparse", False):
            return None
        ins = _wide(call, ("grad", "maximum_indices"))
        return Rule(ins, ((None, "d"),), linear=groups_of(call, [[0]]))

    return Row("!b d, *, … -> !v d; linear in (0)", build)


def _weights_backward() -> Row:
    def build(call: Call) -> Rule | None:
        ins = _wide(call, ("grad", "weight"))
        return Rule(ins, ((None,),), {"d": "sum"}, linear=groups_of(call, [[0], [1]]))

    return Row("!b d, !v d, *, *, * -> *; d by sum; linear in (0) and in (1)", build)


ROWS: dict[str, Row] = {
    "aten._embedding_bag.default": _forward(),
    "aten._embedding_bag_forward_only.default": _forward(),
    "aten._embedding_bag_backward.default": _backward(),
    "aten._embedding_bag_dense_backward.default": _backward(),
    "aten._embedding_bag_per_sample_weights_backward.default": _weights_backward(),
}
