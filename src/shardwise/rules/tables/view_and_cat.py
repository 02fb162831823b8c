"""Views, and concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.notation import ANY_REDUCTION, op_names
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["REGROUPED", "REGROUPED_TEXT", "ROWS", "expand_row", "narrow_row", "view_row"]

REGROUPED = frozenset(
    op_names(
        "view _unsafe_view reshape _reshape_alias view_copy squeeze squeeze.dim squeeze.dims unsqueeze squeeze_copy "
        "squeeze_copy.dim squeeze_copy.dims unsqueeze_copy _reshape_copy"
    )
)
"""Ops whose result has the same elements in another shape; `layout.view` gives its layout."""
REGROUPED_TEXT = "the same elements in another shape: see shardwise.layout.view; passes any reduction"


def view_row(
    text: str,
    outputs: Callable[[Call, Letters], Sequence[Letters]],
    local: Callable[[Call, Place], Local | None] | None = None,
    *,
    sums_only: bool = False,
) -> Row:
    """A row for one tensor whose elements are copied: `outputs` rearranges the letters of its dims.

    Letters that no output has must not be split. Any pending reduction passes, or `sums_only`.
    """

    def build(call: Call) -> Rule | None:
        letters = dim_letters(len(call.shapes[0]))
        after = tuple(outputs(call, letters))
        kept = {x for one in after for x in one}
        before = tuple(x if x in kept else None for x in letters)
        monotone = {} if sums_only else ANY_REDUCTION
        return Rule((before,), after, linear=(frozenset({0}),), monotone=monotone, local=local)

    return Row(f"{text}; {'linear in (0)' if sums_only else 'passes any reduction'}", build)


def _transpose(call: Call, letters: Letters) -> list[Letters]:
    out = list(letters)
    if out:
        a, b = call.dim("dim0"), call.dim("dim1")
        out[a], out[b] = out[b], out[a]
    return [tuple(out)]


def _permute(call: Call, letters: Letters) -> list[Letters]:
    return [tuple(letters[d % len(letters)] for d in call.args["dims"])]


def _expand(call: Call, letters: Letters) -> list[Letters]:
    shape, out = call.shapes[0], call.outputs[0]
    lead = len(out) - len(shape)
    return [(None,) * lead + tuple(x if shape[i] == out[lead + i] else None for i, x in enumerate(letters))]


def expand_row(op: str) -> Row:
    """The row of `expand` or of its copying variant, which run with the shape of the block."""

    def local(call: Call, place: Place) -> Local:
        return Local(((op, (Slot(0), list(place.outputs[0])), {}),))

    return view_row("… d -> … d; expanded dims unsplit", _expand, local)


def _remove_dim(call: Call, letters: Letters) -> list[Letters]:
    d = call.dim()
    return [letters[:d] + letters[d + 1 :] for _ in call.outputs]


def _slice(call: Call, letters: Letters) -> list[Letters]:
    d = call.dim()
    is_full = call.outputs[0][d] == call.shapes[0][d] and call.args.get("step", 1) == 1
    return [letters] if is_full else _fix_dim(call, letters)


def _fix_dim(call: Call, letters: Letters) -> list[Letters]:
    return [dim_letters(len(letters), call.dim()) for _ in call.outputs]


def narrow_row(text: str) -> Row:
    """A row for outputs that each have a range of dim `dim`, which must not be split."""
    return view_row(text, _fix_dim)


def _other_dtype(call: Call) -> Rule:
    letters = dim_letters(len(call.shapes[0]))
    if call.shapes[0] != call.outputs[0]:  # elements of another size
        letters = (*letters[:-1], None)
    return Rule((letters,), (letters,))


def _cat(call: Call) -> Rule | None:
    ndim = len(call.outputs[0])
    after = dim_letters(ndim, int(call.args.get("dim") or 0) % max(ndim, 1))
    # torch ignores empty tensors of one dim
    inputs = tuple(after if len(s) == ndim else (None,) * len(s) for s in call.shapes)
    return Rule(inputs, (after,), linear=(frozenset(range(len(call.shapes))),))


_SAME = view_row("… -> …", lambda call, letters: [letters])

ROWS: dict[str, Row] = {
    "aten.transpose.int": view_row("… a … b … -> … b … a …", _transpose),
    "aten.permute.default": view_row("… -> … permuted", _permute),
    "aten.t.default": view_row("a b -> b a", lambda call, letters: [letters[::-1]]),
    "aten.expand.default": expand_row("aten.expand.default"),
    "aten.select.int": view_row("… !d … -> … …", _remove_dim),
    "aten.unbind.int": view_row("… !d … -> [… …]", _remove_dim),
    "aten.slice.Tensor": view_row("… !d … -> … !d …; d may be split if the slice is all of it", _slice),
    "aten.split.Tensor": narrow_row("… !d … -> [… !d …]"),
    "aten.split_with_sizes.default": narrow_row("… !d … -> [… !d …]"),
    "aten.detach.default": _SAME,
    "aten.alias.default": _SAME,
    # the max, min or product of complex numbers is not that of their parts
    "aten.view_as_real.default": view_row(
        "… -> … !", lambda call, letters: [(*letters, None)], sums_only=True
    ),
    "aten.view_as_complex.default": view_row(
        "… ! -> …", lambda call, letters: [letters[:-1]], sums_only=True
    ),
    # bits are not numbers: no reduction passes
    "aten.view.dtype": Row("… -> …; the last dim unsplit if its size changes", _other_dtype),
    "aten.cat.default": Row("[… !d …] -> … !d …; linear in all jointly", _cat),
}
