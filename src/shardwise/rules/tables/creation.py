"""Ops that make a tensor like another one: its values are not read, so nothing is ever sent."""

from __future__ import annotations

from shardwise.rules.call import Call, Local
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["ROWS"]


def _build(call: Call) -> Rule | None:
    after: tuple[Letters, ...] = tuple((None,) * len(s) for s in call.outputs)
    return Rule(tuple((None,) * len(s) for s in call.shapes), after, local=_local)


def _local(call: Call, place: Place) -> Local | None:
    """Of a size that is given, each rank makes its block."""
    if "size" not in call.args or place.outputs[0] == call.outputs[0]:
        return None
    args = {**call.args, "size": list(place.outputs[0])}
    # how the elements of a block lie in memory is its own affair
    args.pop("stride", None)
    op = "aten.new_empty.default" if "new_empty_strided" in call.op else call.op
    return Local(((op, (), args),))


_NAMES = "zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty new_empty_strided"

ROWS: dict[str, Row] = {
    f"aten.{name}.default": Row("like the first one, which is not read", _build, makes=True)
    for name in _NAMES.split()
}
