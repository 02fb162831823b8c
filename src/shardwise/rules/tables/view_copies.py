"""More views, and the variants of views that copy."""

from __future__ import annotations

from shardwise.rules.call import Call
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.rule import Row, Rule
from shardwise.rules.tables import slicing, view_and_cat
from shardwise.rules.tables.view_and_cat import expand_row, narrow_row, view_row

__all__ = ["ROWS"]


def _diagonal(call: Call, letters: Letters) -> list[Letters]:
    removed = {call.dim("dim1"), call.dim("dim2")}
    return [(*(x for i, x in enumerate(letters) if i not in removed), None)]


def _diag_embed(call: Call) -> Rule | None:
    ndim = len(call.outputs[0])
    new = {call.dim("dim1", ndim), call.dim("dim2", ndim)}
    batch = dim_letters(ndim - 2)
    rest = iter(batch)
    after: Letters = tuple(None if i in new else next(rest) for i in range(ndim))
    # only a sum passes: the zeros beside the diagonal would change a pending max, min or product
    return Rule(((*batch, None),), (after,), linear=(frozenset({0}),))


def _repeat(call: Call, letters: Letters) -> list[Letters]:
    repeats = call.args["repeats"]
    lead = len(repeats) - len(letters)
    once = tuple(x if n == 1 else None for x, n in zip(letters, repeats[lead:], strict=True))
    return [(None,) * lead + once]


def _rot90(call: Call, letters: Letters) -> list[Letters]:
    return [dim_letters(len(letters), *(d % len(letters) for d in call.args["dims"]))]


def _glu_backward(call: Call) -> Rule | None:
    ndim = len(call.shapes[1])
    letters = dim_letters(ndim, call.dim(ndim=ndim))
    return Rule((letters, letters), (letters,), linear=(frozenset({0}),))


def _copy_of(name: str) -> str:
    """The name of the copying variant of a view."""
    _, packet, overload = name.split(".")
    return f"aten.{packet}_copy.{overload}"


_VIEWS = {
    **{
        k: row for k, row in view_and_cat.ROWS.items() if k not in ("aten.cat.default", "aten.expand.default")
    },
    "aten.unfold.default": slicing.ROWS["aten.unfold.default"],
    "aten.diagonal.default": view_row("… !a … !b … -> … … … !", _diagonal),
}

ROWS: dict[str, Row] = {
    "aten.diagonal.default": _VIEWS["aten.diagonal.default"],
    **{_copy_of(name): row for name, row in _VIEWS.items()},
    "aten.expand_copy.default": expand_row("aten.expand_copy.default"),
    "aten.diag_embed.default": Row("… !d -> … !a … !b …; linear in (0)", _diag_embed),
    "aten.repeat.default": view_row("… d … -> … d …; repeated dims unsplit", _repeat),
    "aten.rot90.default": view_row("… !a … !b … -> … !b … !a …", _rot90),
    "aten.narrow_copy.default": narrow_row("… !d … -> … !d …"),
    "aten.glu_backward.default": Row("… !d …, … !d … -> … !d …; linear in (0)", _glu_backward),
}
