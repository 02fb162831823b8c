"""Losses: the dims that are summed may be split, and a mean divides by the global count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import Letters, broadcast_letters, letter_sizes, unsplit
from shardwise.rules.notation import groups_of, op_names
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["MEAN", "NONE", "ROWS", "SUM"]

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`
_ELSEWHERE = -100  # the target in a block whose class another rank has

_Local = Callable[[Call, Place], Local | None]


def _slot(call: Call, name: str) -> int:
    """The slot of an argument, or -1 if it is not a tensor."""
    value = call.args[name]
    return value.number if isinstance(value, Slot) else -1


def _mean_by(count: Callable[[Call], int], more_outputs: int = 0) -> _Local:
    """The local program of a mean over a split dim: the sum over the block divided by the global count.

    `more_outputs`: those after the loss, which are returned as they are.
    """

    def local(call: Call, place: Place) -> Local | None:
        if call.args["reduction"] != MEAN or not place.sharded:
            return None
        steps: tuple[Step, ...] = (
            call.step(reduction=SUM),
            ("aten.div.Scalar", (Out(0, 0) if more_outputs else Out(0), count(call) or math.nan), {}),
        )
        results = (Out(1), *(Out(0, 1 + i) for i in range(more_outputs)))
        return Local(steps, results if more_outputs else ())

    return local


def _rows(call: Call) -> int:
    return call.shapes[_slot(call, "self")][0]


def _elementwise(call: Call) -> Rule | None:
    if call.args["reduction"] == NONE:
        letters = broadcast_letters([*call.shapes, *call.outputs])
        return Rule(tuple(letters[:-1]), (letters[-1],))
    letters = broadcast_letters(call.shapes)
    sizes = letter_sizes(letters, call.shapes)
    local = _mean_by(lambda call: math.prod(sizes.values()))
    return Rule(tuple(letters), ((),), dict.fromkeys(sizes, "sum"), local=local)


def _elementwise_backward(call: Call) -> Rule | None:
    if call.args["reduction"] == MEAN and any(
        d.startswith(("int", "uint", "bool")) for d in call.output_dtypes
    ):
        return None  # the kernel rounds the quotient of integers
    letters = broadcast_letters([*call.shapes, *call.outputs])
    local = _mean_by(lambda call: math.prod(call.shapes[_slot(call, "self")]))
    return Rule(tuple(letters[:-1]), (letters[-1],), linear=groups_of(call, [[0]]), local=local)


def _nll(backward: bool) -> Row:
    """A row for the negative log likelihood: with split classes, the loss of a target is 0 where its class is elsewhere.

    A mean divides by the weights of all targets, which only a sum over all ranks gives: see `alternatives/losses`.
    """

    def build(call: Call) -> Rule | None:
        scores, target, weight = (_slot(call, name) for name in ("self", "target", "weight"))
        ndim = len(call.shapes[scores])
        c = min(ndim - 1, 1)  # the dim of the classes
        classes: Letters = tuple("c" if i == c else f"d{i}" for i in range(ndim))
        rest = tuple(x for x in classes if x != "c")
        if len(rest) != len(call.shapes[target]):
            return None
        if call.dtypes[target] != "int64":
            classes = tuple(None if x == "c" else x for x in classes)  # uint8 cannot represent _ELSEWHERE
        letters: dict[int, Letters] = {scores: classes, target: rest, weight: classes[c : c + 1]}
        local, ranges = _nll_local, frozenset({"c"})
        if backward:
            grad = _slot(call, "grad_output")
            letters[_slot(call, "total_weight")] = ()
            letters[grad] = rest if call.args["reduction"] == NONE else ()
            if len(letters[grad]) != len(call.shapes[grad]):
                return None
        inputs = tuple(letters[i] for i in range(len(call.shapes)))
        if backward:
            return Rule(inputs, (classes,), linear=(frozenset({grad}),), local=local, ranges=ranges)
        if call.args["reduction"] == MEAN:
            return Rule(unsplit(call.shapes), ((), ()))
        reduced = {x: "sum" for x in classes if x is not None}
        if call.args["reduction"] == NONE and rest:  # the total weight is then 0
            return Rule(inputs, (rest, ()), reduced, local=local, alike=frozenset({1}), ranges=ranges)
        return Rule(inputs, ((), ()), reduced, local=local, ranges=ranges)

    if backward:
        return Row("n …, n c …, n …, c, scalar -> n c …; grad is a scalar if reduced; linear in (0)", build)
    return Row("n c …, n …, c -> n …, scalar; c by sum; all dims by sum if summed; unsplit for a mean", build)


def _nll_local(call: Call, place: Place) -> Local | None:
    """Count targets from this rank's first class; a target that is no class at all is an error, as for the full tensor."""
    if "c" not in place.sharded:
        return None
    scores, target = _slot(call, "self"), call.args["target"]
    c = min(len(call.shapes[scores]) - 1, 1)
    start, here, total = place.starts[scores][c], place.inputs[scores][c], call.shapes[scores][c]
    message = "a target is out of bounds: it is neither one of the classes nor ignore_index"
    return Local((
        ("aten.eq.Scalar", (target, call.args["ignore_index"]), {}),
        ("aten.lt.Scalar", (target, 0), {}),
        ("aten.ge.Scalar", (target, total), {}),
        ("aten.logical_or.default", (Out(1), Out(2)), {}),
        ("aten.logical_not.default", (Out(3),), {}),
        ("aten.logical_or.default", (Out(0), Out(4)), {}),
        ("aten.all.default", (Out(5),), {}),
        ("aten._assert_async.msg", (Out(6), message), {}),
        ("aten.sub.Scalar", (target, start), {}),
        ("aten.lt.Scalar", (Out(8), 0), {}),
        ("aten.ge.Scalar", (Out(8), here), {}),
        ("aten.logical_or.default", (Out(9), Out(10)), {}),
        ("aten.logical_or.default", (Out(0), Out(11)), {}),
        ("aten.masked_fill.Scalar", (Out(8), Out(12), _ELSEWHERE), {}),
        call.step(target=Out(13), ignore_index=_ELSEWHERE),
    ))  # fmt: skip


def _row_letters(call: Call, wide: Sequence[str], grad: int = -1) -> tuple[Letters, ...] | None:
    """The letters of a loss per row: `wide` arguments have a dim of classes, the target and the gradient may lack it."""
    letters: dict[int, Letters] = {_slot(call, "target"): ("n",)}
    letters |= {_slot(call, name): ("n", None) for name in wide}
    letters[grad] = ("n",) if call.args["reduction"] == NONE else ()
    inputs = tuple(letters.get(i, (None,) * len(s)) for i, s in enumerate(call.shapes))
    fits = all(len(a) == len(b) for a, b in zip(inputs, call.shapes, strict=True))
    return inputs if fits and len(call.shapes[_slot(call, "self")]) == 2 else None


def _per_row(wide: Sequence[str], more_outputs: int = 0) -> Row:
    """A row for a loss of each row by itself; `more_outputs` after the loss have a dim of classes too."""

    def build(call: Call) -> Rule | None:
        inputs = _row_letters(call, wide)
        if inputs is None:
            return None
        per_row = call.args["reduction"] == NONE
        outputs: tuple[Letters, ...] = (("n",) if per_row else (), *[("n", None)] * more_outputs)
        local = _mean_by(_rows, more_outputs)
        return Rule(inputs, outputs, {} if per_row else {"n": "sum"}, local=local, empty=False)

    target, more = "n !c" if "target" in wide else "n", ", n !c" * more_outputs
    return Row(f"n !c, {target} -> n{more}; n by sum if reduced", build)


def _per_row_backward(wide: Sequence[str]) -> Row:
    def build(call: Call) -> Rule | None:
        grad = _slot(call, "grad_output")
        inputs = _row_letters(call, wide, grad)
        if inputs is None:
            return None
        linear = (frozenset({grad}),)
        return Rule(inputs, (("n", None),), linear=linear, local=_mean_by(_rows), empty=False)

    text = ", ".join("n !c" if name in wide else "n" for name in ("grad_output", "self", "target"))
    return Row(f"{text} -> n !c; grad is a scalar if reduced; linear in (0)", build)


_ELEMENTWISE = Row("pointwise; all dims by sum if reduced", _elementwise)
_ELEMENTWISE_BACKWARD = Row("pointwise; linear in (0)", _elementwise_backward)
_NAMES = op_names("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss")

ROWS: dict[str, Row] = {
    **dict.fromkeys(_NAMES, _ELEMENTWISE),
    **dict.fromkeys(
        [name.replace(".default", "_backward.default") for name in _NAMES], _ELEMENTWISE_BACKWARD
    ),
    "aten.binary_cross_entropy_with_logits.default": _ELEMENTWISE,
    "aten.nll_loss_forward.default": _nll(backward=False),
    "aten.nll_loss2d_forward.default": _nll(backward=False),
    "aten.nll_loss_backward.default": _nll(backward=True),
    "aten.nll_loss2d_backward.default": _nll(backward=True),
    "aten.multi_margin_loss.default": _per_row(["self"]),
    "aten.multi_margin_loss_backward.default": _per_row_backward(["self"]),
    "aten.multilabel_margin_loss_forward.default": _per_row(["self", "target"], more_outputs=1),
    "aten.multilabel_margin_loss_backward.default": _per_row_backward(["self", "target", "is_target"]),
}
