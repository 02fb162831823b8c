"""Losses: what they sum over may be split, and a mean divides by the global count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.notation import groups_of, sizes_of, without_broadcast
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["MEAN", "NONE", "ROWS", "SUM"]

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`
_ELSEWHERE = -100  # a target whose class another rank has; blocks count their classes from 0

_Local = Callable[[Call, Place], Local | None]


def _arguments(call: Call, **changed: object) -> tuple[object, ...]:
    """A call's arguments in the order of its schema, some of them changed."""
    return tuple(changed.get(name, value) for name, value in call.args.items())


def _meaned(count: Callable[[Call], int]) -> _Local:
    """The sum of what is here over the global count, for a mean over what is split."""

    def local(call: Call, place: Place) -> Local | None:
        if call.args["reduction"] != MEAN or not place.sharded:
            return None
        return Local((
            (call.op, _arguments(call, reduction=SUM), {}),
            ("aten.div.Scalar", (Out(0), count(call) or math.nan), {}),
        ))  # fmt: skip

    return local


def _aligned(shapes: Sequence[Sequence[int]]) -> list[Letters]:
    """Letters of tensors that are broadcast against each other."""
    ndim = max(map(len, shapes), default=0)
    said: list[Letters] = [tuple(f"d{ndim - len(s) + i}" for i in range(len(s))) for s in shapes]
    sizes = sizes_of(said, shapes)
    return [without_broadcast(x, s, sizes) for x, s in zip(said, shapes, strict=True)]


def _elementwise() -> Row:
    """A loss of each element by itself: all that is split leaves parts of the sum."""

    def count(call: Call) -> int:
        ndim = max(map(len, call.shapes))
        full = [(1,) * (ndim - len(s)) + tuple(s) for s in call.shapes]
        return math.prod(next((n for n in sizes if n != 1), 1) for sizes in zip(*full, strict=True))

    def build(call: Call) -> Rule | None:
        if call.args["reduction"] == NONE:
            said = _aligned([*call.shapes, *call.outputs])
            return Rule(tuple(said[:-1]), (said[-1],))
        ins = _aligned(call.shapes)
        reduced = {x: "sum" for said in ins for x in said if x is not None}
        return Rule(tuple(ins), ((),), reduced, local=_meaned(count))

    return Row("pointwise, then d by sum for a sum or a mean", build)


def _elementwise_backward() -> Row:
    """The gradient is a number for a sum or a mean, and the mean's count is that of all of the input."""

    def count(call: Call) -> int:
        return math.prod(call.shapes[_slot(call, "self")])

    def build(call: Call) -> Rule | None:
        if call.args["reduction"] == MEAN and any(d.startswith(("int", "uint", "bool")) for d in call.made):
            return None  # of whole numbers the kernel rounds what it divides
        said = _aligned([*call.shapes, *call.outputs])
        return Rule(tuple(said[:-1]), (said[-1],), linear=groups_of(call, [[0]]), local=_meaned(count))

    return Row("pointwise; linear in (0)", build)


def _slot(call: Call, name: str) -> int:
    value = call.args[name]
    return value.number if isinstance(value, Slot) else -1


def _nll(backward: bool) -> Row:
    """Minus the weighted score of each target's class: a split class dim leaves zero where the class is elsewhere.

    A mean is over the weights of all targets, which only a sum over all ranks knows.
    """

    def build(call: Call) -> Rule | None:
        scores = call.shapes[_slot(call, "self")]
        at = 0 if len(scores) == 1 else 1  # where the classes are
        classes: Letters = tuple("c" if i == at else f"d{i}" for i in range(len(scores)))
        rest = tuple(x for x in classes if x != "c")
        target = _slot(call, "target")
        if len(rest) != len(call.shapes[target]):
            return None
        if call.dtypes[target] != "int64":
            classes = tuple(None if x == "c" else x for x in classes)  # no room for a class that is elsewhere
        ranges = frozenset({"c"})  # targets are counted from a block's first class
        said: dict[int, Letters] = {_slot(call, "self"): classes, target: rest}
        if _slot(call, "weight") >= 0:
            said[_slot(call, "weight")] = (classes[at],)
        if backward:
            said[_slot(call, "total_weight")] = ()
            grad = _slot(call, "grad_output")
            said[grad] = rest if call.args["reduction"] == NONE else ()
            # a number's gradient may come with dims of its own
            if len(said[grad]) != len(call.shapes[grad]):
                return None
            ins = tuple(said[i] for i in range(len(call.shapes)))
            return Rule(ins, (classes,), linear=(frozenset({grad}),), local=_nll_local, ranges=ranges)
        ins = tuple(said[i] for i in range(len(call.shapes)))
        if call.args["reduction"] == MEAN:
            # each rank's mean would be over its own targets; there is an offer that sums first
            return Rule(tuple((None,) * len(i) for i in ins), ((), ()))
        reduced = {x: "sum" for x in classes if x is not None}
        if call.args["reduction"] == NONE and rest:  # the total of the weights is then zero
            return Rule(ins, (rest, ()), reduced, local=_nll_local, alike=frozenset({1}), ranges=ranges)
        return Rule(ins, ((), ()), reduced, local=_nll_local, ranges=ranges)

    if backward:
        return Row("… or nothing, n c …, n …, c, nothing -> n c …; linear in (0)", build)
    return Row("n c …, n …, c -> n … or nothing; c by sum, and for a sum all; whole for a mean", build)


def _nll_local(call: Call, place: Place) -> Local | None:
    """Targets counted from this rank's first class; one that no rank has is the error it is for the whole."""
    if "c" not in place.sharded:
        return None
    scores, target = _slot(call, "self"), call.args["target"]
    at = 0 if len(call.shapes[scores]) == 1 else 1
    start, here, total = place.starts[scores][at], place.inputs[scores][at], call.shapes[scores][at]
    said = "a target is out of bounds: it is neither one of the classes nor ignore_index"
    return Local((
        ("aten.eq.Scalar", (target, call.args["ignore_index"]), {}),
        ("aten.lt.Scalar", (target, 0), {}),
        ("aten.ge.Scalar", (target, total), {}),
        ("aten.logical_or.default", (Out(1), Out(2)), {}),
        ("aten.logical_not.default", (Out(3),), {}),
        ("aten.logical_or.default", (Out(0), Out(4)), {}),
        ("aten.all.default", (Out(5),), {}),
        ("aten._assert_async.msg", (Out(6), said), {}),
        ("aten.sub.Scalar", (target, start), {}),
        ("aten.lt.Scalar", (Out(8), 0), {}),
        ("aten.ge.Scalar", (Out(8), here), {}),
        ("aten.logical_or.default", (Out(9), Out(10)), {}),
        ("aten.logical_or.default", (Out(0), Out(11)), {}),
        ("aten.masked_fill.Scalar", (Out(8), Out(12), _ELSEWHERE), {}),
        (call.op, _arguments(call, target=Out(13), ignore_index=_ELSEWHERE), {}),
    ))  # fmt: skip


def _per_row(names: Sequence[str], wide: Sequence[str], also: int = 0) -> Row:
    """A loss of each row by itself: `wide` arguments have the classes, the others of `names` one value per row.

    `also` outputs beyond the loss have the classes too. A mean is over the rows, as the kernel has it.
    """

    def build(call: Call) -> Rule | None:
        scores = call.shapes[_slot(call, "self")]
        if len(scores) != 2:
            return None
        said: dict[int, Letters] = {}
        for name in names:
            if (slot := _slot(call, name)) >= 0:
                said[slot] = ("n", None) if name in wide else ("n",)
        ins = tuple(said.get(i, (None,) * len(s)) for i, s in enumerate(call.shapes))
        if any(len(a) != len(b) for a, b in zip(ins, call.shapes, strict=True)):
            return None
        each = call.args["reduction"] == NONE
        outs: tuple[Letters, ...] = (("n",) if each else (), *[("n", None)] * also)
        return Rule(ins, outs, {} if each else {"n": "sum"}, local=local, empty=False)

    def local(call: Call, place: Place) -> Local | None:
        if call.args["reduction"] != MEAN or not place.sharded:
            return None
        rows = call.shapes[_slot(call, "self")][0]
        results = (Out(1), *(Out(0, 1 + i) for i in range(also)))
        first = Out(0, 0) if also else Out(0)
        return Local((
            (call.op, _arguments(call, reduction=SUM), {}),
            ("aten.div.Scalar", (first, rows), {}),
        ), results if also else ())  # fmt: skip

    return Row("n !c, n … -> n or nothing; n by sum", build)


def _per_row_backward(names: Sequence[str], wide: Sequence[str]) -> Row:
    def build(call: Call) -> Rule | None:
        scores, grad = call.shapes[_slot(call, "self")], _slot(call, "grad_output")
        if len(scores) != 2:
            return None
        said: dict[int, Letters] = {grad: ("n",) if call.args["reduction"] == NONE else ()}
        for name in names:
            if (slot := _slot(call, name)) >= 0:
                said[slot] = ("n", None) if name in wide else ("n",)
        ins = tuple(said.get(i, (None,) * len(s)) for i, s in enumerate(call.shapes))
        if any(len(a) != len(b) for a, b in zip(ins, call.shapes, strict=True)):
            return None
        linear = (frozenset({grad}),)
        rows = _meaned(lambda call: call.shapes[_slot(call, "self")][0])
        return Rule(ins, (("n", None),), linear=linear, local=rows, empty=False)

    return Row("n or nothing, n !c, n … -> n !c; linear in (0)", build)


_ELEMENTWISE = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss".split()

ROWS: dict[str, Row] = {
    **{f"aten.{name}.default": _elementwise() for name in _ELEMENTWISE},
    **{f"aten.{name}_backward.default": _elementwise_backward() for name in _ELEMENTWISE},
    "aten.binary_cross_entropy_with_logits.default": _elementwise(),
    "aten.nll_loss_forward.default": _nll(backward=False),
    "aten.nll_loss2d_forward.default": _nll(backward=False),
    "aten.nll_loss_backward.default": _nll(backward=True),
    "aten.nll_loss2d_backward.default": _nll(backward=True),
    "aten.multi_margin_loss.default": _per_row(["self", "target"], ["self"]),
    "aten.multi_margin_loss_backward.default": _per_row_backward(["self", "target"], ["self"]),
    "aten.multilabel_margin_loss_forward.default": _per_row(["self", "target"], ["self", "target"], also=1),
    "aten.multilabel_margin_loss_backward.default": _per_row_backward(
        ["self", "target", "is_target"], ["self", "target", "is_target"]
    ),
}
