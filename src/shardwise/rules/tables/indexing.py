"""Reading and writing at indices: what is not indexed passes through, and so do the dims of what is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.notation import groups_of, linear_text
from shardwise.rules.rule import Letters, Place, Row, Rule
from shardwise.rules.tables.masked_lookup import Step, looked_up

__all__ = ["ROWS", "can_add", "counts_from_front", "reads_less", "writing"]

_ADDED = {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"} | {
    "int8", "int16", "int32", "int64", "uint8",
}  # fmt: skip


def can_add(call: Call) -> bool:
    """Whether values of the first tensor can be parts of a sum."""
    return call.dtypes[0] in _ADDED


def reads_less(call: Call, size: int, count: int) -> bool:
    """Whether parts of what is read are no more to add up than what is read from is to gather."""
    return can_add(call) and counts_from_front(call) and 2 * count <= size


def counts_from_front(call: Call) -> bool:
    """Whether the second tensor is an index that one can count with."""
    return call.dtypes[1] in ("int32", "int64")


class _Indexed(NamedTuple):
    """Which dims are indexed, the letters of each index, and those of what is read."""

    dims: tuple[int, ...]
    indices: dict[int, Letters]
    read: Letters


def _indexed(call: Call) -> _Indexed | None:
    """How the indices of `x[a, :, b]` meet the dims of x; None for masks, whose result depends on values."""
    listed = call.args["indices"]
    at = [d for d, v in enumerate(listed) if isinstance(v, Slot)]
    slots = [listed[d].number for d in at]
    if not at or any(call.dtypes[s] not in ("int32", "int64") for s in slots):
        return None
    count = max(len(call.shapes[s]) for s in slots)
    sizes = [
        max(
            (
                call.shapes[s][i - count + len(call.shapes[s])]
                for s in slots
                if i >= count - len(call.shapes[s])
            ),
            key=lambda n: (n != 1, n),
        )
        for i in range(count)
    ]
    if any(0 in call.shapes[s] for s in slots):
        return None
    joint: Letters = tuple(f"i{i}" for i in range(count))

    def letters(shape: Sequence[int]) -> Letters:
        lead = count - len(shape)
        return tuple(joint[lead + i] if n == sizes[lead + i] else None for i, n in enumerate(shape))

    rest: Letters = tuple(f"d{d}" for d in range(len(call.shapes[0])))
    together = at == list(range(at[0], at[-1] + 1))
    before = rest[: at[0]] if together else ()
    after = tuple(x for d, x in enumerate(rest) if d not in at and x not in before)
    return _Indexed(tuple(at), {s: letters(call.shapes[s]) for s in slots}, before + joint + after)


def _index() -> Row:
    def build(call: Call) -> Rule | None:
        said = _indexed(call)
        if said is None or len(said.read) != len(call.outputs[0]):
            return None
        first: Letters = tuple(None if d in said.dims else f"d{d}" for d in range(len(call.shapes[0])))
        size = call.shapes[0][said.dims[0]]
        count = math.prod(call.shapes[call.args["indices"][said.dims[0]].number])
        split = len(said.dims) == 1 and reads_less(call, size, count)
        if split:
            first = tuple("v" if d in said.dims else x for d, x in enumerate(first))
        return Rule(
            inputs=tuple(first if i == 0 else said.indices[i] for i in range(len(call.shapes))),
            outputs=(said.read,),
            reduced={"v": "sum"} if split else {},
            linear=(frozenset({0}),),
            local=_index_local if split else None,
            ranges=frozenset({"v"}),
        )

    return Row("x[a, :, b]: indexed dims whole, or one by lookup; linear in (0)", build)


def _index_local(call: Call, place: Place) -> Local | None:
    if "v" not in place.sharded:
        return None
    indices = call.args["indices"]
    d = next(d for d, v in enumerate(indices) if isinstance(v, Slot))
    rows = place.inputs[0][d]
    found = looked_up(indices[d], call.shapes[0][d], place.starts[0][d], rows, wraps=True)
    here = [found.here if v is not None else None for v in indices]
    return _read(call, place, d, found.steps, ("aten.index.Tensor", (Slot(0), here), {}), found.elsewhere)


def _read(call: Call, place: Place, d: int, steps: tuple[Step, ...], read: Step, elsewhere: Out) -> Local:
    """Read what is here, and zero what is elsewhere; `d` is the dim that is looked up in."""
    if place.inputs[0][d] == 0:
        return Local((*steps, ("aten.new_zeros.default", (Slot(0), list(place.outputs[0])), {})))
    done = [*steps, read]
    values, mask = Out(len(done) - 1), elsewhere
    for _ in range(len(call.shapes[0]) - 1 - d):
        done.append(("aten.unsqueeze.default", (mask, -1), {}))
        mask = Out(len(done) - 1)
    return Local((*done, ("aten.masked_fill.Scalar", (values, mask, 0), {})))


def writing(
    call: Call,
    place: Place,
    at: dict[int, tuple[str, Slot]],
    write: Callable[[Out, dict[int, Out]], Step],
    wraps: bool,
) -> Local | None:
    """Write to a block at indices that may point elsewhere: to one more row at its end, which is then cut off.

    `at` has the letter and the index of each dim that is indexed.
    """
    split = {d: index for d, (letter, index) in at.items() if letter in place.sharded}
    if not split:
        return None
    steps: list[Step] = []
    target: Slot | Out = Slot(0)
    shape, found = list(place.inputs[0]), {}
    for d, index in split.items():
        rows = shape[d]
        steps.append(
            ("aten.new_zeros.default", (Slot(0), [1 if i == d else n for i, n in enumerate(shape)]), {})
        )
        steps.append(("aten.cat.default", ([target, Out(len(steps) - 1)], d), {}))
        target = Out(len(steps) - 1)
        shape[d] += 1
        here = looked_up(
            index, call.shapes[0][d], place.starts[0][d], rows, wraps=wraps, at=len(steps), instead=rows
        )
        steps += here.steps
        found[d] = here.here
    steps.append(write(target if isinstance(target, Out) else Out(0), found))
    for d in split:
        steps.append(("aten.slice.Tensor", (Out(len(steps) - 1), d, 0, place.inputs[0][d]), {}))
    # dense, and no view of more than it shows
    return Local((*steps, ("aten.clone.default", (Out(len(steps) - 1),), {})))


def _index_put() -> Row:
    """Values are written into the dims that are not indexed alike; adding, each rank may add what it has."""

    def build(call: Call) -> Rule | None:
        said = _indexed(call)
        if said is None:
            return _masked(call)
        values = call.shapes[-1]
        indexed = {d: f"v{d}" for d in said.dims}
        first: Letters = tuple(indexed.get(d, f"d{d}") for d in range(len(call.shapes[0])))
        sizes = _sizes(said, call)
        if len(values) > len(said.read):
            return None
        lead = len(said.read) - len(values)
        last: Letters = tuple(
            x if x is not None and sizes[x] == n else None
            for x, n in zip(said.read[lead:], values, strict=True)
        )
        adds = bool(call.args["accumulate"]) and can_add(call)
        inputs = [first, *(said.indices[i] for i in range(1, len(call.shapes) - 1)), last]
        joint = {x for one in said.indices.values() for x in one if x is not None}
        if not adds:
            inputs = [tuple(None if x in joint else x for x in one) for one in inputs]
        return Rule(
            inputs=tuple(inputs),
            outputs=(first,),
            reduced=dict.fromkeys(joint, "sum") if adds else {},
            linear=groups_of(call, [[0, 2]]) if adds else (),
            addends=frozenset({0}) if adds else frozenset(),
            local=_index_put_local,
            ranges=frozenset(indexed.values()),
        )

    return Row("x[a, :, b] = y: other dims pass; adding, indices by sum; linear in (0,2) if adding", build)


def _masked(call: Call) -> Rule | None:
    """Values written where one mask is true, the same ones at each such place: each rank writes to its block."""
    listed = call.args["indices"]
    at = [d for d, v in enumerate(listed) if isinstance(v, Slot)]
    if len(at) != 1 or call.dtypes[1] != "bool":
        return None
    first: Letters = tuple(f"d{i}" for i in range(len(call.shapes[0])))
    mask, values = first[at[0] : at[0] + len(call.shapes[1])], call.shapes[2]
    kept: Letters = (*first[: at[0]], None, *first[at[0] + len(mask) :])
    said = kept[len(kept) - len(values) :]
    if len(values) > len(kept) or any(x is None and n != 1 for x, n in zip(said, values, strict=True)):
        return None
    sizes = dict(zip(first, call.shapes[0], strict=True))
    last: Letters = tuple(
        x if x is not None and sizes[x] == n else None for x, n in zip(said, values, strict=True)
    )
    return Rule((first, mask, last), (first,))


def _sizes(said: _Indexed, call: Call) -> dict[str, int]:
    out = {f"d{d}": n for d, n in enumerate(call.shapes[0])}
    for slot, one in said.indices.items():
        out |= {x: n for x, n in zip(one, call.shapes[slot], strict=True) if x is not None}
    return out


def _index_put_local(call: Call, place: Place) -> Local | None:
    indices, adds = call.args["indices"], call.args["accumulate"]
    at = {d: (f"v{d}", v) for d, v in enumerate(indices) if isinstance(v, Slot)}

    def write(target: Out, found: dict[int, Out]) -> Step:
        here = [found.get(d, v) for d, v in enumerate(indices)]
        return "aten.index_put.default", (target, here, Slot(len(call.shapes) - 1), adds), {}

    return writing(call, place, at, write, wraps=True)


def _selected() -> Row:
    def build(call: Call) -> Rule | None:
        (shape, index), d = call.shapes, _dim(call)
        if not shape:
            return None
        split = reads_less(call, shape[d], math.prod(index))
        first: Letters = tuple(("v" if split else None) if i == d else f"d{i}" for i in range(len(shape)))
        return Rule(
            inputs=(first, ("n",) * len(index)),
            outputs=(tuple("n" if i == d and index else None if i == d else x for i, x in enumerate(first)),),
            reduced={"v": "sum"} if split else {},
            linear=(frozenset({0}),),
            local=_selected_local if split else None,
            ranges=frozenset({"v"}),
        )

    return Row("… v …, n -> … n …; v by lookup, or whole; linear in (0)", build)


def _selected_local(call: Call, place: Place) -> Local | None:
    if "v" not in place.sharded:
        return None
    d = _dim(call)
    found = looked_up(Slot(1), call.shapes[0][d], place.starts[0][d], place.inputs[0][d])
    read: Step = ("aten.index_select.default", (Slot(0), d, found.here), {})
    return _read(call, place, d, found.steps, read, found.elsewhere)


def _dim(call: Call) -> int:
    return int(call.args["dim"]) % max(len(call.shapes[0]), 1)


def _at_dim(
    *, adds: bool = False, linear: Sequence[Sequence[int]] = (), zero: bool = False, source: bool = True
) -> Row:
    """A row for a write at an index along one dim: `adds` says that ranks may add what each has of it."""

    def build(call: Call) -> Rule | None:
        shape, index, *more = call.shapes
        if not shape or not counts_from_front(call):
            return None
        d = _dim(call)
        first: Letters = tuple("v" if i == d else f"d{i}" for i in range(len(shape)))
        sums = adds and can_add(call)
        n = "n" if sums and index else None
        rest: list[Letters] = [(None,) * len(s) for s in more]
        if source:
            if len(more[0]) != len(shape):
                return None
            rest[0] = tuple(n if i == d else x for i, x in enumerate(first))
        passes = bool(linear) and (sums or not adds) and (not zero or call.args["value"] == 0)
        return Rule(
            inputs=(first, (n,) * len(index), *rest),
            outputs=(first,),
            reduced={"n": "sum"} if n else {},
            linear=groups_of(call, linear) if passes else (),
            addends=frozenset({0}) if n else frozenset(),
            local=_at_dim_local,
            ranges=frozenset({"v"}),
        )

    sums = "; n by sum" if adds else ""
    text = f"… v …, {'n, … n …' if source and adds else '!n, … !n …' if source else '!n'} -> … v …{sums}"
    return Row(text + linear_text(linear) + (" if it writes 0" if zero else ""), build)


def _at_dim_local(call: Call, place: Place) -> Local | None:
    d = _dim(call)

    def write(target: Out, found: dict[int, Out]) -> Step:
        swapped = {0: target, 1: found[d]}
        args = {k: swapped.get(v.number, v) if isinstance(v, Slot) else v for k, v in call.args.items()}
        return call.op, (), args

    index = next(v for v in call.args.values() if isinstance(v, Slot) and v.number == 1)
    return writing(call, place, {d: ("v", index)}, write, wraps=call.op in _WRAPS)


# the ones among those that write at an index which count a negative one from the end
_WRAPS = {"aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor"}


def _reduced_at() -> Row:
    """Written at an index by a reduction; torch's product of narrow floats fails on a block of one element a slice."""
    inner = _at_dim()

    def build(call: Call) -> Rule | None:
        if call.args["reduce"] == "prod" and call.dtypes[0] in ("bfloat16", "float16"):
            return Rule(tuple((None,) * len(s) for s in call.shapes), ((None,) * len(call.outputs[0]),))
        return inner.build(call)

    return Row(inner.text + "; a product of narrow floats whole", build)


ROWS: dict[str, Row] = {
    **dict.fromkeys(["aten.index.Tensor", "aten._unsafe_index.Tensor"], _index()),
    **dict.fromkeys(
        ["aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default"],
        _index_put(),
    ),
    "aten.index_select.default": _selected(),
    "aten.index_add.default": _at_dim(adds=True, linear=[[0, 2]]),
    "aten.index_copy.default": _at_dim(),
    "aten.index_reduce.default": _reduced_at(),
    "aten.index_fill.int_Scalar": _at_dim(linear=[[0]], zero=True, source=False),
    "aten.index_fill.int_Tensor": _at_dim(source=False),
}
