"""Products: a contracted dim that is split leaves each rank a part of the sum."""

from __future__ import annotations

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.notation import row
from shardwise.rules.rule import Letters, Place, Row, Rule
from shardwise.rules.tables.masked_lookup import looked_up

__all__ = ["ROWS"]


def _addmm(batch: bool) -> Row:
    """A matrix added to a product: what is added is broadcast, and is a part where the product is."""
    lead = ("b",) if batch else ()

    def build(call: Call) -> Rule | None:
        out: Letters = (*lead, "m", "n")
        shape, whole = call.shapes[0], call.outputs[0]
        said: Letters = out[len(out) - len(shape) :]
        sizes = dict(zip(out, whole, strict=True))
        added = tuple(
            x if x is not None and sizes[x] == n else None for x, n in zip(said, shape, strict=True)
        )
        return Rule(
            inputs=(added, (*lead, "m", "k"), (*lead, "k", "n")),
            outputs=(out,),
            reduced={"k": "sum"},
            linear=(frozenset({0, 1}), frozenset({0, 2})),
            addends=frozenset({0}),
        )

    text = "b " if batch else ""
    return Row(
        f"… added, {text}m k, {text}k n -> {text}m n; linear in (0,1) and in (0,2)", build, reads=False
    )


def _lookup(call: Call, place: Place) -> Local | None:
    """Rows that are elsewhere are zero here, so that the parts add up."""
    if "v" not in place.sharded:
        return None
    rows, start, all_rows = place.inputs[0][0], place.starts[0][0], call.shapes[0][0]
    found = looked_up(Slot(1), all_rows, start, rows)
    if rows == 0:
        return Local((*found.steps, ("aten.new_zeros.default", (Slot(0), list(place.outputs[0])), {})))
    n = len(found.steps)
    return Local((
        *found.steps,
        ("aten.embedding.default", (Slot(0), found.here), {}),
        ("aten.unsqueeze.default", (found.elsewhere, -1), {}),
        ("aten.masked_fill.Scalar", (Out(n), Out(n + 1), 0), {}),
    ))  # fmt: skip


def _lookup_backward() -> Row:
    """A split batch leaves parts of the sum, but not of one that is divided by how often each index is there."""
    split = row("… d, … -> !v d", linear=[[0]])
    whole = row("*, * -> *", linear=[[0]])
    text = f"{split.text}; whole if scaled by frequency"
    return Row(text, lambda call: (whole if call.args["scale_grad_by_freq"] else split).build(call))


ROWS: dict[str, Row] = {
    "aten.mm.default": row("m k, k n -> m n", linear=[[0], [1]], reads=False),
    "aten.bmm.default": row("b m k, b k n -> b m n", linear=[[0], [1]], reads=False),
    "aten.mv.default": row("m k, k -> m", linear=[[0], [1]], reads=False),
    "aten.dot.default": row("k, k -> ", linear=[[0], [1]], reads=False),
    "aten.vdot.default": row("k, k -> ", linear=[[0], [1]], reads=False),
    "aten.addmm.default": _addmm(batch=False),
    "aten.baddbmm.default": _addmm(batch=True),
    "aten.embedding.default": row("v d, … -> … d", linear=[[0]], local=_lookup, ranges="v"),
    "aten.embedding_dense_backward.default": _lookup_backward(),
}
