"""Grouped matrix products, as mixtures of experts use them: rows, columns or the contracted dim are cut into groups at offsets.

A 3D operand has one matrix per group, a 2D operand the concatenation of all groups. The offsets count positions in the full
tensor, so each rank gets all of them, and translates them to its range of positions and of groups.
"""

from __future__ import annotations

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.notation import row
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ROWS"]


def _local(call: Call, place: Place) -> Local:
    """The product of a rank's blocks; always a program, because a block's strides may be less aligned than the kernel needs."""
    a, b = place.starts[:2]
    start = a[-1] if len(a) == len(b) else a[0] if len(a) == 2 else b[1]
    group = 0 if len(a) == len(b) else b[0] if len(a) == 2 else a[0]
    offsets = call.args["offs"]
    args = (Slot(0), Slot(1), offsets, start, group, list(place.outputs[0]), call.args["out_dtype"])
    return Local((("blocks.grouped_mm", args, {}),))


_LINEAR = [[0], [1]]
_FORMS = {
    (2, 3): row("t k, g k n, * -> t n", linear=_LINEAR, local=_local, ranges="tg"),
    (3, 2): row("g m k, k t, * -> m t", linear=_LINEAR, local=_local, ranges="tg"),
    (2, 2): row("m t, t n, * -> !g m n", linear=_LINEAR, local=_local, ranges="t"),
    (3, 3): row("g m k, g k n -> g m n", linear=_LINEAR, local=_local),
}


def _build(call: Call) -> Rule | None:
    form = _FORMS.get((len(call.shapes[0]), len(call.shapes[1])))
    return None if form is None else form.build(call)


ROWS: dict[str, Row] = {
    "aten._grouped_mm.default": Row(
        "; or ".join(f.text.partition(";")[0] for f in _FORMS.values()) + "; linear in (0) and in (1)", _build
    ),
}
