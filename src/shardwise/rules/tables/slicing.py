"""Ops that take, set or repeat ranges of a dim: that dim is whole in a row, and all others pass through.

Where that dim is split, `tensor/ranges.py` offers to exchange only what is needed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["ROWS"]

_Said = Callable[[Call], tuple[Letters, Letters]]
_KEPT = {"max": "max", "min": "min", "product": "product"}


def _ranged(text: str, said: _Said, *, sized: bool = False, copies: bool = False) -> Row:
    """A row for one tensor; `sized`: the op is told the size of its result; `copies`: anything pending passes."""

    def local(call: Call, place: Place) -> Local:
        args = [Slot(0) if isinstance(v, Slot) else v for v in call.args.values()]
        args[1] = list(place.outputs[0])
        return Local(((call.op, tuple(args), {}),))

    def build(call: Call) -> Rule | None:
        before, after = said(call)
        return Rule(
            (before,),
            (after,),
            linear=(frozenset({0}),),
            monotone=_KEPT if copies else {},
            local=local if sized else None,
        )

    return Row(text + ("; any reduction passes" if copies else "; linear in (0)"), build)


def _letters(ndim: int, *whole: int) -> Letters:
    return tuple(None if i in whole else f"d{i}" for i in range(ndim))


def _same_dims(call: Call) -> tuple[Letters, Letters]:
    said = _letters(len(call.outputs[0]), call.args["dim"] % len(call.outputs[0]))
    return said, said


def _select_backward(call: Call) -> tuple[Letters, Letters]:
    ndim = len(call.outputs[0])
    d = call.args["dim"] % ndim
    after = _letters(ndim, d)
    return after[:d] + after[d + 1 :], after


def _unfold(call: Call) -> tuple[Letters, Letters]:
    ndim = len(call.shapes[0])
    said = _letters(ndim, call.args["dimension"] % ndim) if ndim else ()
    return said, (*said, None)


def _unfold_backward(call: Call) -> tuple[Letters, Letters]:
    ndim = len(call.outputs[0])
    said = _letters(ndim, call.args["dim"] % ndim) if ndim else ()
    return (*said, None), said


def _padded(call: Call) -> Rule | None:
    """Dims that are padded are whole; zeros, and only they, may be added to each part of a sum."""
    ndim, pad = len(call.shapes[0]), call.args["pad"]
    said = _letters(ndim, *(ndim - 1 - i // 2 for i, n in enumerate(pad) if n))
    return Rule((said,), (said,), linear=(frozenset({0}),) if call.args["value"] == 0 else ())


def _stacked(call: Call) -> Rule | None:
    """Tensors of one shape that lie alike, and a new dim that is whole."""
    ndim = len(call.outputs[0])
    d = call.args["dim"] % ndim
    after = _letters(ndim, d)
    before = after[:d] + after[d + 1 :]
    every: Sequence[Letters] = (before,) * len(call.shapes)
    return Rule(tuple(every), (after,), linear=(frozenset(range(len(call.shapes))),))


ROWS: dict[str, Row] = {
    "aten.slice_backward.default": _ranged("… !d … -> … !d …", _same_dims, sized=True),
    "aten.select_backward.default": _ranged("… … -> … !d …", _select_backward, sized=True),
    "aten.unfold.default": _ranged("… !d … -> … !d … !", _unfold, copies=True),
    "aten.unfold_backward.default": _ranged("… !d … ! -> … !d …", _unfold_backward, sized=True),
    "aten.constant_pad_nd.default": Row("… !d … -> … !d …; linear in (0) if padded by 0", _padded),
    "aten.stack.default": Row("… each -> … !new …; linear in all", _stacked),
}
