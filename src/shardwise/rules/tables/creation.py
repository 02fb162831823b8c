"""Ops that create a tensor like another one without reading its values, so that nothing is communicated."""

from __future__ import annotations

from shardwise.layout import global_stride
from shardwise.rules.call import Call, Local
from shardwise.rules.letters import unsplit
from shardwise.rules.notation import op_names
from shardwise.rules.rule import Creates, Place, Row, Rule

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


def _by_caller(call: Call) -> Creates:
    """What `empty_like` creates: memory for a program, values for torch's kernels.

    Kernels write values of each rank to it, such as the mask of dropout; the product of a pending tensor and a pending
    mask would have to reduce one of them. Calls from Python always have `pin_memory`.
    """
    return "values" if call.args.get("pin_memory") is None else "memory"


_TEXT = "creates a tensor, in the layout of the first one if the shapes are equal"
_VALUES = Row(_TEXT, _build, makes=lambda call: "values")
_MEMORY = Row(f"{_TEXT}; pending reductions stay", _build, makes=lambda call: "memory")
_EITHER = Row(f"{_TEXT}; pending reductions stay if a program calls it", _build, makes=_by_caller)

ROWS: dict[str, Row] = {
    **dict.fromkeys(op_names("zeros_like ones_like full_like new_zeros new_ones new_full"), _VALUES),
    **dict.fromkeys(op_names("new_empty new_empty_strided"), _MEMORY),
    **dict.fromkeys(op_names("empty_like"), _EITHER),
}
