"""Reading and writing elements along a dim by an index of as many dims, and writing back what a view shows."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.rules.call import Call, Local, Out, Slot
from shardwise.rules.notation import groups_of, linear_text
from shardwise.rules.rule import Letters, Place, Row, Rule
from shardwise.rules.tables.indexing import can_add, counts_from_front, reads_less, writing
from shardwise.rules.tables.masked_lookup import Step, looked_up

__all__ = ["ROWS"]


def _dim(call: Call, name: str = "dim", ndim: int | None = None) -> int:
    return int(call.args[name]) % max(len(call.shapes[0]) if ndim is None else ndim, 1)


def _gather(call: Call) -> Rule | None:
    (shape, index), d = call.shapes, _dim(call)
    if not shape or len(shape) != len(index):
        return None
    alike: Letters = tuple(
        f"d{i}" if i != d and n == m else None for i, (n, m) in enumerate(zip(shape, index, strict=True))
    )
    split = reads_less(call, shape[d], index[d])
    read: Letters = tuple("n" if i == d else x for i, x in enumerate(alike))
    return Rule(
        inputs=(tuple("v" if split and i == d else x for i, x in enumerate(alike)), read),
        outputs=(read,),
        reduced={"v": "sum"} if split else {},
        linear=(frozenset({0}),),
        local=_gather_local if split else None,
        ranges=frozenset({"v"}),
    )


def _gather_local(call: Call, place: Place) -> Local | None:
    if "v" not in place.sharded:
        return None
    d = _dim(call)
    found = looked_up(Slot(1), call.shapes[0][d], place.starts[0][d], place.inputs[0][d])
    if place.inputs[0][d] == 0:
        return Local((*found.steps, ("aten.new_zeros.default", (Slot(0), list(place.outputs[0])), {})))
    return Local((
        *found.steps,
        ("aten.gather.default", (Slot(0), d, found.here), {}),
        ("aten.masked_fill.Scalar", (Out(len(found.steps)), found.elsewhere, 0), {}),
    ))  # fmt: skip


def _scatter(*, adds: bool = False, linear: Sequence[Sequence[int]] = (), zero: bool = False) -> Row:
    """A row for a write at an index that has as many dims; a dim passes if all tensors have the whole of it.

    Of a larger target or source only a corner is written or read, and its blocks would be others.
    """

    def build(call: Call) -> Rule | None:
        shape = call.shapes[0]
        if not shape or not counts_from_front(call) or any(len(s) != len(shape) for s in call.shapes):
            return None
        d = _dim(call)
        alike = [i != d and len({s[i] for s in call.shapes}) == 1 for i in range(len(shape))]
        sums = adds and can_add(call) and len({s[d] for s in call.shapes[1:]}) == 1
        first: Letters = tuple("v" if i == d else f"d{i}" if alike[i] else None for i in range(len(shape)))
        rest: Letters = tuple(("n" if sums else None) if i == d else x for i, x in enumerate(first))
        passes = not zero or call.args["value"] == 0
        return Rule(
            inputs=(first,) + (rest,) * (len(call.shapes) - 1),
            outputs=(first,),
            reduced={"n": "sum"} if sums else {},
            linear=groups_of(call, linear) if passes and (can_add(call) or not adds) else (),
            addends=frozenset({0}) if sums else frozenset(),
            local=_scatter_local,
            ranges=frozenset({"v"}),
        )

    text = "… v …, … n …, … n … -> … v …; n by sum" if adds else "… v …, … !n …, … !n … -> … v …"
    return Row(text + linear_text(linear) + (" if it writes 0" if zero else ""), build)


def _scatter_local(call: Call, place: Place) -> Local | None:
    d = _dim(call)

    def write(target: Out, found: dict[int, Out]) -> Step:
        swapped = {0: target, 1: found[d]}
        args = {k: swapped.get(v.number, v) if isinstance(v, Slot) else v for k, v in call.args.items()}
        return call.op, (), args

    return writing(call, place, {d: ("v", Slot(1))}, write, wraps=False)


def _take(call: Call) -> Rule | None:
    read: Letters = tuple(f"i{i}" for i in range(len(call.shapes[1])))
    return Rule(((None,) * len(call.shapes[0]), read), (read,), linear=(frozenset({0}),))


def _put(call: Call) -> Rule | None:
    shape, index, source = call.shapes
    adds = bool(call.args["accumulate"]) and can_add(call)
    each: Letters = tuple(f"i{i}" if adds and index == source else None for i in range(len(index)))
    whole: Letters = (None,) * len(shape)
    return Rule(
        inputs=(whole, each, each if index == source else (None,) * len(source)),
        outputs=(whole,),
        reduced={x: "sum" for x in each if x is not None},
        linear=(frozenset({0, 2}),) if adds else (),
        addends=frozenset({0}) if any(each) else frozenset(),
    )


def _select_scatter(call: Call) -> Rule | None:
    ndim, d = len(call.shapes[0]), _dim(call)
    first: Letters = tuple(f"d{i}" for i in range(ndim))
    return Rule(
        inputs=(first, first[:d] + first[d + 1 :]),
        outputs=(first,),
        linear=(frozenset({0, 1}),),
        local=_select_scatter_local,
        ranges=frozenset({f"d{d}"}),
    )


def _select_scatter_local(call: Call, place: Place) -> Local | None:
    d = _dim(call)
    if f"d{d}" not in place.sharded:
        return None
    at = call.args["index"] % call.shapes[0][d] - place.starts[0][d]
    if 0 <= at < place.inputs[0][d]:
        return Local((("aten.select_scatter.default", (Slot(0), Slot(1), d, at), {}),))
    return Local((("aten.clone.default", (Slot(0),), {}),))


def _slice_scatter(call: Call) -> Rule | None:
    shape, d = call.shapes[0], _dim(call)
    first: Letters = tuple(None if i == d else f"d{i}" for i in range(len(shape)))
    return Rule((first, first), (first,), linear=(frozenset({0, 1}),))


def _two(call: Call, ndim: int) -> tuple[int, int]:
    return _dim(call, "dim1", ndim), _dim(call, "dim2", ndim)


def _diagonal_scatter(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    gone = _two(call, ndim)
    first: Letters = tuple(None if i in gone else f"d{i}" for i in range(ndim))
    rest: Letters = (*(x for i, x in enumerate(first) if i not in gone), None)
    return Rule((first, rest), (first,), linear=(frozenset({0, 1}),))


def _diagonal_backward(call: Call) -> Rule | None:
    ndim = len(call.outputs[0])
    gone = _two(call, ndim)
    after: Letters = tuple(None if i in gone else f"d{i}" for i in range(ndim))
    before: Letters = (*(x for i, x in enumerate(after) if i not in gone), None)

    def local(call: Call, place: Place) -> Local | None:
        return Local(((call.op, (), {**call.args, "input_sizes": list(place.outputs[0])}),))

    return Rule((before,), (after,), linear=(frozenset({0}),), local=local)


ROWS: dict[str, Row] = {
    "aten.gather.default": Row("… v …, … n … -> … n …; v by lookup, or whole; linear in (0)", _gather),
    "aten.scatter_add.default": _scatter(adds=True, linear=[[0, 2]]),
    "aten.scatter.src": _scatter(),
    "aten.scatter.reduce": _scatter(),
    "aten.scatter_reduce.two": _scatter(),
    "aten.scatter.value": _scatter(linear=[[0]], zero=True),
    "aten.scatter.value_reduce": _scatter(),
    "aten.take.default": Row("*, … -> …; linear in (0)", _take),
    "aten.put.default": Row("*, …, … -> *; adding, … by sum; linear in (0,2) if adding", _put),
    "aten.select_scatter.default": Row("… d …, … … -> … d …; linear in (0,1)", _select_scatter),
    "aten.slice_scatter.default": Row("… !d …, … !d … -> … !d …; linear in (0,1)", _slice_scatter),
    "aten.diagonal_scatter.default": Row(
        "… !a … !b …, … ! -> … !a … !b …; linear in (0,1)", _diagonal_scatter
    ),
    "aten.diagonal_backward.default": Row("… ! -> … !a … !b …; linear in (0)", _diagonal_backward),
}
