"""Ops that take, set, pad or repeat ranges of a dim: that dim must not be split, all others may.

If that dim is split, `alternatives/slicing` and `alternatives/rearrange` exchange only the elements that are needed.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.rules.call import Call, Local
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.notation import ANY_REDUCTION
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS", "with_block_size"]


def with_block_size(call: Call, place: Place) -> Local:
    """Run a backward op with the size of the block in place of that of the result."""
    return Local((call.step(input_sizes=list(place.outputs[0])),))


def _backward(text: str, letters: Callable[[Call], tuple[Letters, Letters]]) -> Row:
    """A row for a backward op of one tensor, from the letters of its input and of its output."""

    def build(call: Call) -> Rule | None:
        before, after = letters(call)
        return Rule((before,), (after,), linear=(frozenset({0}),), local=with_block_size)

    return Row(f"{text}; linear in (0)", build)


def _slice_letters(call: Call) -> tuple[Letters, Letters]:
    ndim = len(call.outputs[0])
    letters = dim_letters(ndim, call.dim(ndim=ndim))
    return letters, letters


def _select_letters(call: Call) -> tuple[Letters, Letters]:
    _, after = _slice_letters(call)
    return tuple(x for x in after if x is not None), after


def _unfold_letters(call: Call) -> tuple[Letters, Letters]:
    _, after = _slice_letters(call)
    return (*after, None), after


def _unfold(call: Call) -> Rule | None:
    before = dim_letters(len(call.shapes[0]), call.dim("dimension"))
    return Rule((before,), ((*before, None),), linear=(frozenset({0}),), monotone=ANY_REDUCTION)


def _pad(call: Call) -> Rule | None:
    """Padding adds to each term of a pending sum, so the sum passes only if the padding is 0."""
    ndim, pad = len(call.shapes[0]), call.args["pad"]
    letters = dim_letters(ndim, *(ndim - 1 - i // 2 for i, n in enumerate(pad) if n))
    return Rule((letters,), (letters,), linear=(frozenset({0}),) if call.args["value"] == 0 else ())


def _stack(call: Call) -> Rule | None:
    before, after = _select_letters(call)
    every = range(len(call.shapes))
    return Rule((before,) * len(every), (after,), linear=(frozenset(every),))


ROWS: dict[str, Row] = {
    "aten.slice_backward.default": _backward("… !d … -> … !d …", _slice_letters),
    "aten.select_backward.default": _backward("… … -> … !d …", _select_letters),
    "aten.unfold.default": Row("… !d … -> … !d … !; passes any reduction", _unfold),
    "aten.unfold_backward.default": _backward("… !d … ! -> … !d …", _unfold_letters),
    "aten.constant_pad_nd.default": Row("… !d … -> … !d …; linear in (0) if value is 0", _pad),
    "aten.stack.default": Row("[… …] -> … !new …; linear in all jointly", _stack),
}
