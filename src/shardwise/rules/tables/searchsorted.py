"""Searching and counting: what is searched in is whole, and what is searched for lies as it likes."""

from __future__ import annotations

from shardwise.rules.call import Call
from shardwise.rules.notation import row
from shardwise.rules.rule import Letters, Row, Rule
from shardwise.rules.tables.pointwise import pointwise

__all__ = ["ROWS"]


def _searched() -> Row:
    """A sequence of one dim is searched for all values alike, one of more dims row by row."""
    one, rows = row("!s, …, !s -> …"), row("… !s, … n, … !s -> … n")
    text = f"{one.text}, or {rows.text}"
    return Row(text, lambda call: (one if len(call.shapes[0]) == 1 else rows).build(call))


def _counted(call: Call) -> Rule | None:
    """Counts of blocks add up, if the bins do not depend on what is in them."""
    if call.args["min"] == call.args["max"] or call.dtypes[0] not in ("float32", "float64"):
        return None
    each: Letters = tuple(f"d{i}" for i in range(len(call.shapes[0])))
    return Rule((each,), ((None,),), dict.fromkeys([x for x in each if x is not None], "sum"))


ROWS: dict[str, Row] = {
    "aten.bucketize.Tensor": row("…, !s -> …"),
    "aten.searchsorted.Tensor": _searched(),
    "aten.isin.Tensor_Tensor": row("…, * -> …"),
    "aten.isin.Tensor_Scalar": pointwise(),
    "aten.histc.default": Row("… -> !; … by sum, if the range is given", _counted),
}
