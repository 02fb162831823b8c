"""Ops that only look at a tensor in another way, or put tensors together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.call import Call, Local, Slot
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["REGROUPED", "ROWS"]

# Ops whose result is the same elements in another shape: `layout.view` says how the factors regroup.
REGROUPED = frozenset(
    f"aten.{name}"
    for name in "view.default _unsafe_view.default reshape.default _reshape_alias.default view_copy.default "
    "squeeze.default squeeze.dim squeeze.dims unsqueeze.default squeeze_copy.default squeeze_copy.dim "
    "squeeze_copy.dims unsqueeze_copy.default _reshape_copy.default".split()
)

_Outputs = Callable[[Call, Letters], Sequence[Letters]]


def _moves(
    text: str,
    outputs: _Outputs,
    local: Callable[[Call, Place], Local | None] | None = None,
    *,
    sums_only: bool = False,
) -> Row:
    """A row for one tensor whose dims turn up elsewhere; all that is pending passes, or `sums_only`."""

    def build(call: Call) -> Rule | None:
        before: Letters = tuple(f"d{i}" for i in range(len(call.shapes[0])))
        after = tuple(outputs(call, before))
        kept = {x for said in after for x in said}
        first = tuple(x if x in kept else None for x in before)
        same = {} if sums_only else {"max": "max", "min": "min", "product": "product"}
        return Rule((first,), after, linear=(frozenset({0}),), monotone=same, local=local)

    return Row(text, build)


def _dim(call: Call, name: str = "dim") -> int:
    return int(call.args[name]) % max(len(call.shapes[0]), 1)


def _transposed(call: Call, before: Letters) -> list[Letters]:
    out = list(before)
    if out:
        a, b = _dim(call, "dim0"), _dim(call, "dim1")
        out[a], out[b] = out[b], out[a]
    return [tuple(out)]


def _permuted(call: Call, before: Letters) -> list[Letters]:
    return [tuple(before[d % len(before)] for d in call.args["dims"])]


def _expanded(call: Call, before: Letters) -> list[Letters]:
    shape, out = call.shapes[0], call.outputs[0]
    lead = len(out) - len(shape)
    return [(None,) * lead + tuple(x if shape[i] == out[lead + i] else None for i, x in enumerate(before))]


def _expand_local(call: Call, place: Place) -> Local:
    return Local((("aten.expand.default", (Slot(0), list(place.outputs[0])), {}),))


def _without_dim(call: Call, before: Letters) -> list[Letters]:
    d = _dim(call)
    return [before[:d] + before[d + 1 :] for _ in call.outputs]


def _sliced(call: Call, before: Letters) -> list[Letters]:
    d = _dim(call)
    whole = call.outputs[0][d] == call.shapes[0][d] and call.args.get("step", 1) == 1
    return [tuple(None if i == d and not whole else x for i, x in enumerate(before))]


def _cut(call: Call, before: Letters) -> list[Letters]:
    d = _dim(call)
    return [tuple(None if i == d else x for i, x in enumerate(before)) for _ in call.outputs]


def _cat(call: Call) -> Rule | None:
    """Tensors that lie alike but for the dim they are put together on; empty ones of one dim are let pass."""
    ndim = len(call.outputs[0])
    d = int(call.args.get("dim") or 0) % max(ndim, 1)
    after: Letters = tuple(None if i == d else f"d{i}" for i in range(ndim))
    ins = tuple(after if len(s) == ndim else (None,) * len(s) for s in call.shapes)
    return Rule(ins, (after,), linear=(frozenset(range(len(call.shapes))),))


_SAME = _moves("same", lambda call, before: [before])
# complex numbers have no extremes, and their product is not that of their parts
_COMPLEX = _moves("same", lambda call, before: [(*before, None)[: len(call.outputs[0])]], sums_only=True)

ROWS: dict[str, Row] = {
    "aten.transpose.int": _moves("… a … b … -> … b … a …", _transposed),
    "aten.permute.default": _moves("dims -> permuted dims", _permuted),
    "aten.t.default": _moves("a b -> b a", lambda call, before: [before[::-1]]),
    "aten.expand.default": _moves("… d -> … d, new dims whole", _expanded, _expand_local),
    "aten.select.int": _moves("… !d … -> … …", _without_dim),
    "aten.unbind.int": _moves("… !d … -> … … each", _without_dim),
    "aten.slice.Tensor": _moves("… !d … -> … !d …, or all of it", _sliced),
    "aten.split.Tensor": _moves("… !d … -> … !d … each", _cut),
    "aten.split_with_sizes.default": _moves("… !d … -> … !d … each", _cut),
    "aten.detach.default": _SAME,
    "aten.alias.default": _SAME,
    "aten.view_as_real.default": _COMPLEX,
    "aten.view_as_complex.default": _COMPLEX,
    "aten.cat.default": Row("… !d … each -> … !d …; linear in all", _cat),
}
