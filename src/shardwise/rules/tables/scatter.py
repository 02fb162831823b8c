"""Reading and writing elements along a dim by an index with as many dims, and writing through a view."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import Letters, dim_letters
from shardwise.rules.notation import groups_of, linear_text
from shardwise.rules.rule import Place, Row, Rule
from shardwise.rules.tables import masked_lookup
from shardwise.rules.tables.indexing import LOOKUP, can_add, has_integer_index, reads_few, write_along_dim
from shardwise.rules.tables.slicing import with_block_size

__all__ = ["ROWS"]


def _gather(call: Call) -> Rule | None:
    (shape, index), d = call.shapes, call.dim()
    if not shape or len(shape) != len(index):
        return None
    # where the index is smaller only a part of the dim is read, which is not what a block has
    equal = dim_letters(len(shape), d, *(i for i, n in enumerate(shape) if n != index[i]))
    split = reads_few(call, shape[d], index[d])
    elements: Letters = (*equal[:d], "n", *equal[d + 1 :])
    first: Letters = (*equal[:d], "v" if split else None, *equal[d + 1 :])
    return masked_lookup.rule((first, elements), elements, _gather_local if split else None)


def _gather_local(call: Call, place: Place) -> Local | None:
    d = call.dim()

    def op(here: Out) -> Step:
        return "aten.gather.default", (Slot(0), d, here), {}

    return masked_lookup.read(call, place, d, Slot(1), op, 0)


def _scatter(*, adds: bool = False, linear: Sequence[Sequence[int]] = (), if_zero: bool = False) -> Row:
    """A row for a write at an index; a dim may be split if all tensors have the same size there.

    Of a larger target or source only a part is written or read, which is not what a block has. The arguments are
    those of `index_add` and its relatives.
    """

    def build(call: Call) -> Rule | None:
        shape = call.shapes[0]
        if not shape or not has_integer_index(call) or any(len(s) != len(shape) for s in call.shapes):
            return None
        d = call.dim()
        differ = [i for i in range(len(shape)) if len({s[i] for s in call.shapes}) > 1]
        sums = adds and can_add(call) and len({s[d] for s in call.shapes[1:]}) == 1
        equal = dim_letters(len(shape), *differ)
        first: Letters = (*equal[:d], "v", *equal[d + 1 :])
        rest: Letters = (*equal[:d], "n" if sums else None, *equal[d + 1 :])
        passes = not if_zero or call.args["value"] == 0
        return Rule(
            inputs=(first,) + (rest,) * (len(call.shapes) - 1),
            outputs=(first,),
            reduced={"n": "sum"} if sums else {},
            linear=groups_of(call, linear) if passes and (can_add(call) or not adds) else (),
            addends=frozenset({0}) if sums else frozenset(),
            local=write_along_dim,
            ranges=frozenset({"v"}),
        )

    text = "… v …, … n …, … n … -> … v …; n by sum" if adds else "… v …, … !n …, … !n … -> … v …"
    return Row(text + linear_text(linear) + (" if value is 0" if if_zero else ""), build)


def _take(call: Call) -> Rule | None:
    elements: Letters = tuple(f"i{i}" for i in range(len(call.shapes[1])))
    return Rule(((None,) * len(call.shapes[0]), elements), (elements,), linear=(frozenset({0}),))


def _put(call: Call) -> Rule | None:
    shape, index, source = call.shapes
    adds = bool(call.args["accumulate"]) and can_add(call)
    elements: Letters = tuple(f"i{i}" if adds and index == source else None for i in range(len(index)))
    target: Letters = (None,) * len(shape)
    return Rule(
        inputs=(target, elements, elements if index == source else (None,) * len(source)),
        outputs=(target,),
        reduced={x: "sum" for x in elements if x is not None},
        linear=(frozenset({0, 2}),) if adds else (),
        addends=frozenset({0}) if any(elements) else frozenset(),
    )


def _select_scatter(call: Call) -> Rule | None:
    d, first = call.dim(), dim_letters(len(call.shapes[0]))
    return Rule(
        inputs=(first, first[:d] + first[d + 1 :]),
        outputs=(first,),
        linear=(frozenset({0, 1}),),
        local=_select_scatter_local,
        ranges=frozenset({f"d{d}"}),
    )


def _select_scatter_local(call: Call, place: Place) -> Local | None:
    d = call.dim()
    if f"d{d}" not in place.sharded:
        return None
    at = call.args["index"] % call.shapes[0][d] - place.starts[0][d]
    if 0 <= at < place.inputs[0][d]:
        return Local((("aten.select_scatter.default", (Slot(0), Slot(1), d, at), {}),))
    return Local((("aten.clone.default", (Slot(0),), {}),))


def _slice_scatter(call: Call) -> Rule | None:
    first = dim_letters(len(call.shapes[0]), call.dim())
    return Rule((first, first), (first,), linear=(frozenset({0, 1}),))


def _diagonal_letters(call: Call, ndim: int) -> tuple[Letters, Letters]:
    """The letters of a tensor and of its diagonal."""
    letters = dim_letters(ndim, call.dim("dim1", ndim), call.dim("dim2", ndim))
    return letters, (*(x for x in letters if x is not None), None)


def _diagonal_scatter(call: Call) -> Rule | None:
    first, diagonal = _diagonal_letters(call, len(call.shapes[0]))
    return Rule((first, diagonal), (first,), linear=(frozenset({0, 1}),))


def _diagonal_backward(call: Call) -> Rule | None:
    after, diagonal = _diagonal_letters(call, len(call.outputs[0]))
    return Rule((diagonal,), (after,), linear=(frozenset({0}),), local=with_block_size)


ROWS: dict[str, Row] = {
    "aten.gather.default": Row(f"… v …, … n … -> … n …; {LOOKUP}; linear in (0)", _gather),
    "aten.scatter_add.default": _scatter(adds=True, linear=[[0, 2]]),
    "aten.scatter.src": _scatter(),
    "aten.scatter.reduce": _scatter(),
    "aten.scatter_reduce.two": _scatter(),
    "aten.scatter.value": _scatter(linear=[[0]], if_zero=True),
    "aten.scatter.value_reduce": _scatter(),
    "aten.take.default": Row("*, … -> …; linear in (0)", _take),
    "aten.put.default": Row("*, !…, !… -> *; if accumulate, … by sum; linear in (0,2) if accumulate", _put),
    "aten.select_scatter.default": Row("… d …, … … -> … d …; linear in (0,1)", _select_scatter),
    "aten.slice_scatter.default": Row("… !d …, … !d … -> … !d …; linear in (0,1)", _slice_scatter),
    "aten.diagonal_scatter.default": Row(
        "… !a … !b …, … ! -> … !a … !b …; linear in (0,1)", _diagonal_scatter
    ),
    "aten.diagonal_backward.default": Row("… ! -> … !a … !b …; linear in (0)", _diagonal_backward),
}
