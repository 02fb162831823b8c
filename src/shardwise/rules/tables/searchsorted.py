"""Searches and histograms: the sorted sequence must be replicated, the values may be split."""

from __future__ import annotations

from shardwise.rules.call import Call
from shardwise.rules.letters import dim_letters
from shardwise.rules.notation import row
from shardwise.rules.rule import Row, Rule
from shardwise.rules.tables.pointwise import pointwise

__all__ = ["ROWS"]


def _searchsorted() -> Row:
    one, per_row = row("!s, …, !s -> …"), row("… !s, … n, … !s -> … n")
    text = f"{one.text}; or row by row: {per_row.text}"
    return Row(text, lambda call: (one if len(call.shapes[0]) == 1 else per_row).build(call))


def _histc(call: Call) -> Rule | None:
    # without a given range the bins depend on all values
    if call.args["min"] == call.args["max"] or call.dtypes[0] not in ("float32", "float64"):
        return None
    letters = dim_letters(len(call.shapes[0]))
    return Rule((letters,), ((None,),), {x: "sum" for x in letters if x is not None})


ROWS: dict[str, Row] = {
    "aten.bucketize.Tensor": row("…, !s -> …"),
    "aten.searchsorted.Tensor": _searchsorted(),
    "aten.isin.Tensor_Tensor": row("…, * -> …"),
    "aten.isin.Tensor_Scalar": pointwise(),
    "aten.histc.default": Row("… -> !; … by sum; no rule unless min and max are given", _histc),
}
