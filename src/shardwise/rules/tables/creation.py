"""Ops that create a tensor like another one without reading its values, so that nothing is communicated."""

from __future__ import annotations

from shardwise.layout import global_stride
from shardwise.rules.call import Call, Local
from shardwise.rules.letters import unsplit
from shardwise.rules.notation import op_names
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS"]


def _build(call: Call) -> Rule | None:
    return Rule(unsplit(call.shapes), unsplit(call.outputs), local=_local)


def _local(call: Call, place: Place) -> Local | None:
    """Create a block instead of the full tensor where the size is an argument."""
    if "size" not in call.args or place.outputs[0] == call.outputs[0]:
        return None
    args = {**call.args, "size": list(place.outputs[0])}
    if "stride" in args:  # the block's dims in the same order
        args["stride"] = list(global_stride(place.outputs[0], args["stride"]))
    return Local(((call.op, (), args),))


_TEXT = "creates a tensor, in the layout of the first one if the shapes are equal"
_VALUES = Row(_TEXT, _build, makes="values")
_MEMORY = Row(f"{_TEXT}; pending reductions stay", _build, makes="memory")

# Memory of `empty_like` counts as values: torch writes the masks of dropout to it, and the product of a pending tensor
# and a pending mask would have to reduce one of them.
ROWS: dict[str, Row] = {
    **dict.fromkeys(
        op_names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full"), _VALUES
    ),
    **dict.fromkeys(op_names("new_empty new_empty_strided"), _MEMORY),
}
