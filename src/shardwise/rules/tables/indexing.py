"""Reading and writing at indices: dims that are not indexed may be split, and so may the dims of the indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import (
    Letters,
    broadcast_letters,
    dim_letters,
    letter_sizes,
    unsplit,
    without_broadcast,
)
from shardwise.rules.notation import groups_of, linear_text
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables import masked_lookup

__all__ = ["LOOKUP", "ROWS", "can_add", "has_integer_index", "reads_few", "write_along_dim"]

LOOKUP = "v by masked lookup if few elements are read, otherwise unsplit"

_SUMMABLE = {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"} | {
    "int8", "int16", "int32", "int64", "uint8",
}  # fmt: skip


def can_add(call: Call) -> bool:
    """Whether values of the first tensor can be terms of a pending sum."""
    return call.dtypes[0] in _SUMMABLE


def has_integer_index(call: Call) -> bool:
    """Whether the second tensor is an integer index, on which a masked lookup can do arithmetic."""
    return call.dtypes[1] in ("int32", "int64")


def reads_few(call: Call, size: int, count: int) -> bool:
    """Whether a masked lookup of `count` elements costs no more than gathering the dim of `size` that they are read from."""
    return can_add(call) and has_integer_index(call) and 2 * count <= size


class _Indexed(NamedTuple):
    """The indexed dims of `x[a, :, b]`, the letters of each index by slot, and those of the elements read."""

    dims: tuple[int, ...]
    indices: dict[int, Letters]
    elements: Letters


def _match_indices(call: Call) -> _Indexed | None:
    """Match the indices of `x[a, :, b]` with the dims of x; None for masks, because the result's shape depends on values."""
    indices = call.args["indices"]
    dims = [d for d, v in enumerate(indices) if isinstance(v, Slot)]
    slots = [indices[d].number for d in dims]
    shapes = [call.shapes[s] for s in slots]
    if (
        not dims
        or any(call.dtypes[s] not in ("int32", "int64") for s in slots)
        or any(0 in s for s in shapes)
    ):
        return None
    joint: Letters = tuple(f"i{i}" for i in range(max(map(len, shapes))))
    letters = dim_letters(len(call.shapes[0]))
    # torch puts the dims of separated indices first
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    before = letters[: dims[0]] if adjacent else ()
    after = tuple(x for d, x in enumerate(letters) if d not in dims and x not in before)
    by_slot = dict(zip(slots, broadcast_letters(shapes, "i"), strict=True))
    return _Indexed(tuple(dims), by_slot, before + joint + after)


def _index(call: Call) -> Rule | None:
    match = _match_indices(call)
    if match is None or len(match.elements) != len(call.outputs[0]):
        return None
    first = dim_letters(len(call.shapes[0]), *match.dims)
    d = match.dims[0]
    count = math.prod(call.shapes[call.args["indices"][d].number])
    split = len(match.dims) == 1 and reads_few(call, call.shapes[0][d], count)
    if split:
        first = (*first[:d], "v", *first[d + 1 :])
    inputs = (first, *(match.indices[i] for i in range(1, len(call.shapes))))
    return masked_lookup.rule(inputs, match.elements, _index_local if split else None)


def _index_local(call: Call, place: Place) -> Local | None:
    indices = call.args["indices"]
    d = next(d for d, v in enumerate(indices) if isinstance(v, Slot))

    def op(here: Out) -> Step:
        return "aten.index.Tensor", (Slot(0), [None if v is None else here for v in indices]), {}

    return masked_lookup.read(call, place, d, indices[d], op, len(call.shapes[0]) - 1 - d, wraps=True)


def _index_put(call: Call) -> Rule | None:
    """Dims of the target may be split; those of the indices only if the op adds, because then each rank adds its part."""
    match = _match_indices(call)
    if match is None:
        return _masked_put(call)
    target, *shapes, values = call.shapes
    if len(values) > len(match.elements):
        return None
    indexed = {d: f"v{d}" for d in match.dims}
    first: Letters = tuple(indexed.get(d, f"d{d}") for d in range(len(target)))
    indices = [match.indices[i] for i in range(1, len(call.shapes) - 1)]
    sizes = letter_sizes([dim_letters(len(target)), *indices], [target, *shapes])
    last = without_broadcast(match.elements[len(match.elements) - len(values) :], values, sizes)
    adds = bool(call.args["accumulate"]) and can_add(call)
    joint = {x for one in indices for x in one if x is not None}
    inputs = [first, *indices, last]
    if not adds:
        inputs = [tuple(None if x in joint else x for x in one) for one in inputs]
    return Rule(
        inputs=tuple(inputs),
        outputs=(first,),
        reduced=dict.fromkeys(joint, "sum") if adds else {},
        # terms that replace terms are the terms of the result, as long as all ranks write to the same places
        linear=groups_of(call, [[0, 2]]) if adds or not call.args["accumulate"] else (),
        addends=frozenset({0}) if adds else frozenset(),
        local=_index_put_local,
        ranges=frozenset(indexed.values()),
    )


def _index_put_local(call: Call, place: Place) -> Local | None:
    indices, adds = call.args["indices"], call.args["accumulate"]

    def op(target: Out, here: dict[int, Out]) -> Step:
        local = [here.get(d, v) for d, v in enumerate(indices)]
        return "aten.index_put.default", (target, local, Slot(len(call.shapes) - 1), adds), {}

    by_dim = {d: (f"v{d}", v) for d, v in enumerate(indices) if isinstance(v, Slot)}
    return masked_lookup.write(call, place, by_dim, op, wraps=True)


def _masked_put(call: Call) -> Rule | None:
    """The same values written wherever one mask is true: each rank writes to its block."""
    dims = [d for d, v in enumerate(call.args["indices"]) if isinstance(v, Slot)]
    if len(dims) != 1 or call.dtypes[1] != "bool":
        return None
    (d,), (target, mask_shape, values) = dims, call.shapes
    first = dim_letters(len(target))
    mask = first[d : d + len(mask_shape)]
    kept: Letters = (*first[:d], None, *first[d + len(mask) :])
    letters = kept[len(kept) - len(values) :]
    if len(values) > len(kept) or any(x is None and n != 1 for x, n in zip(letters, values, strict=True)):
        return None
    last = without_broadcast(letters, values, letter_sizes([first], [target]))
    return Rule((first, mask, last), (first,))


def _index_select(call: Call) -> Rule | None:
    (shape, index), d = call.shapes, call.dim()
    if not shape:
        return None
    split = reads_few(call, shape[d], math.prod(index))
    before, after = dim_letters(len(shape))[:d], dim_letters(len(shape))[d + 1 :]
    inputs: tuple[Letters, ...] = ((*before, "v" if split else None, *after), ("n",) * len(index))
    output: Letters = (*before, "n" if index else None, *after)
    return masked_lookup.rule(inputs, output, _index_select_local if split else None)


def _index_select_local(call: Call, place: Place) -> Local | None:
    d = call.dim()

    def op(here: Out) -> Step:
        return "aten.index_select.default", (Slot(0), d, here), {}

    return masked_lookup.read(call, place, d, Slot(1), op, len(call.shapes[0]) - 1 - d)


def _write_row(
    *, adds: bool = False, linear: Sequence[Sequence[int]] = (), if_zero: bool = False, source: bool = True
) -> Row:
    """A row for a write at an index along one dim.

    `adds`: the op adds, so ranks may each add a part of the `source`. `if_zero`: `linear` holds only for the value 0.
    """

    def build(call: Call) -> Rule | None:
        shape, index, *more = call.shapes
        if not shape or not has_integer_index(call):
            return None
        d = call.dim()
        first: Letters = tuple("v" if i == d else f"d{i}" for i in range(len(shape)))
        sums = adds and can_add(call)
        n = "n" if sums and index else None
        rest = list(unsplit(more))
        if source:
            if len(more[0]) != len(shape):
                return None
            rest[0] = tuple(n if i == d else x for i, x in enumerate(first))
        passes = bool(linear) and (sums or not adds) and (not if_zero or call.args["value"] == 0)
        return Rule(
            inputs=(first, (n,) * len(index), *rest),
            outputs=(first,),
            reduced={"n": "sum"} if n else {},
            linear=groups_of(call, linear) if passes else (),
            addends=frozenset({0}) if n else frozenset(),
            local=write_along_dim,
            ranges=frozenset({"v"}),
        )

    sums = "; n by sum" if adds else ""
    text = f"… v …, {'n, … n …' if source and adds else '!n, … !n …' if source else '!n'} -> … v …{sums}"
    return Row(text + linear_text(linear) + (" if value is 0" if if_zero else ""), build)


def write_along_dim(call: Call, place: Place) -> Local | None:
    """The local program of a write at an index, the second tensor, along a dim of the first one."""
    d = call.dim()

    def op(target: Out, here: dict[int, Out]) -> Step:
        local = {0: target, 1: here[d]}
        args = {k: local.get(v.number, v) if isinstance(v, Slot) else v for k, v in call.args.items()}
        return call.op, (), args

    # index_fill is the only one that accepts negative indices
    return masked_lookup.write(call, place, {d: ("v", Slot(1))}, op, wraps="index_fill" in call.op)


def _index_reduce() -> Row:
    inner = _write_row()

    def build(call: Call) -> Rule | None:
        # torch's kernel fails on blocks with slices of one element
        if call.args["reduce"] == "prod" and call.dtypes[0] in ("bfloat16", "float16"):
            return Rule(unsplit(call.shapes), unsplit(call.outputs))
        return inner.build(call)

    return Row(inner.text + "; unsplit for a product of 16-bit floats", build)


_INDEX = Row("x[a, :, b]: dims of x that are not indexed and of the indices may be split; one indexed dim by masked "
             "lookup if few elements are read; linear in (0)", _index)  # fmt: skip
_INDEX_PUT = Row("x[a, :, b] = y: dims of x may be split; if accumulate, those of the indices too, by sum; "
                 "linear in (0,2)", _index_put)  # fmt: skip

ROWS: dict[str, Row] = {
    **dict.fromkeys(["aten.index.Tensor", "aten._unsafe_index.Tensor"], _INDEX),
    **dict.fromkeys(
        ["aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default"],
        _INDEX_PUT,
    ),
    "aten.index_select.default": Row(f"… v …, n -> … n …; {LOOKUP}; linear in (0)", _index_select),
    "aten.index_add.default": _write_row(adds=True, linear=[[0, 2]]),
    "aten.index_copy.default": _write_row(),
    "aten.index_reduce.default": _index_reduce(),
    "aten.index_fill.int_Scalar": _write_row(linear=[[0]], if_zero=True, source=False),
    "aten.index_fill.int_Tensor": _write_row(source=False),
}
