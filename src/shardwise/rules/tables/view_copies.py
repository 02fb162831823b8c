"""More ops that show a tensor in another shape, and those that copy what a view would show."""

from __future__ import annotations

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.rule import Letters, Place, Row, Rule
from shardwise.rules.tables import view_and_cat as shape

__all__ = ["ROWS"]

_KEPT = {"max": "max", "min": "min", "product": "product"}


def _copied(before: Letters, after: Letters) -> Rule:
    """A rule for an op that only copies elements: all that is pending passes."""
    kept = tuple(x if x in after else None for x in before)
    return Rule((kept,), (after,), linear=(frozenset({0}),), monotone=_KEPT)


def _each(ndim: int) -> Letters:
    return tuple(f"d{i}" for i in range(ndim))


def _diagonal(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    gone = {call.args["dim1"] % ndim, call.args["dim2"] % ndim}
    return _copied(_each(ndim), (*(x for i, x in enumerate(_each(ndim)) if i not in gone), None))


def _diag_embed(call: Call) -> Rule | None:
    ndim = len(call.outputs[0])
    new = {call.args["dim1"] % ndim, call.args["dim2"] % ndim}
    rest = iter(_each(ndim - 2))
    after: Letters = tuple(None if i in new else next(rest) for i in range(ndim))
    # the zeros beside the diagonal are no part of a pending product or extreme
    return Rule(((*_each(ndim - 2), None),), (after,), linear=(frozenset({0}),))


def _unfold(call: Call) -> Rule | None:
    each = _each(len(call.shapes[0]))
    if not each:
        return None
    d = call.args["dimension"] % len(each)
    return _copied(each, (*(None if i == d else x for i, x in enumerate(each)), None))


def _repeat(call: Call) -> Rule | None:
    """Dims that are repeated once; of the others, the result has each block several times."""
    each, repeats = _each(len(call.shapes[0])), call.args["repeats"]
    lead = len(repeats) - len(each)
    once = tuple(x if n == 1 else None for x, n in zip(each, repeats[lead:], strict=True))
    return _copied(each, (None,) * lead + once)


def _rot90(call: Call) -> Rule | None:
    each = _each(len(call.shapes[0]))
    turned = {d % len(each) for d in call.args["dims"]}
    return _copied(each, tuple(None if i in turned else x for i, x in enumerate(each)))


def _narrow(call: Call) -> Rule | None:
    each = _each(len(call.shapes[0]))
    d = call.args["dim"] % len(each)
    return _copied(each, tuple(None if i == d else x for i, x in enumerate(each)))


def _expand_copy(call: Call) -> Rule | None:
    rule = shape.ROWS["aten.expand.default"].build(call)
    if rule is None:
        return None
    return Rule(rule.inputs, rule.outputs, linear=rule.linear, monotone=rule.monotone, local=_expand_local)


def _expand_local(call: Call, place: Place) -> Local:
    return Local((("aten.expand_copy.default", (Slot(0), list(place.outputs[0])), {}),))


def _glu_backward(call: Call) -> Rule | None:
    each = _each(len(call.shapes[1]))
    d = call.args["dim"] % len(each)
    said: Letters = tuple(None if i == d else x for i, x in enumerate(each))
    return Rule((said, said), (said,), linear=(frozenset({0}),))


def _copy_of(name: str) -> str:
    """The name of the op that copies what a view shows."""
    _, packet, overload = name.split(".")
    return f"aten.{packet}_copy.{overload}"


_VIEWS = "transpose.int permute.default t.default select.int unbind.int slice.Tensor split.Tensor "
_VIEWS += "split_with_sizes.default detach.default alias.default view_as_real.default view_as_complex.default"

ROWS: dict[str, Row] = {
    **{_copy_of(f"aten.{name}"): shape.ROWS[f"aten.{name}"] for name in _VIEWS.split()},
    "aten.expand_copy.default": Row(shape.ROWS["aten.expand.default"].text, _expand_copy),
    **dict.fromkeys(
        ["aten.diagonal.default", "aten.diagonal_copy.default"], Row("… !a … !b … -> … !", _diagonal)
    ),
    "aten.unfold_copy.default": Row("… !d … -> … !d … !", _unfold),
    "aten.diag_embed.default": Row("… !d -> … !a … !b …; linear in (0)", _diag_embed),
    "aten.repeat.default": Row("… d … -> … d …, repeated ones whole", _repeat),
    "aten.rot90.default": Row("… !a … !b … -> … !b … !a …", _rot90),
    "aten.narrow_copy.default": Row("… !d … -> … !d …", _narrow),
    "aten.glu_backward.default": Row("… !d …, … !d … -> … !d …; linear in (0)", _glu_backward),
}
