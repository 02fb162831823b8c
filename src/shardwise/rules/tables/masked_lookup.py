"""Local programs that read or write at indices into a dim of which a rank has only a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shardwise.rules.call import Call, Local, Out, Slot, Step
from shardwise.rules.letters import Letters
from shardwise.rules.rule import Place, Rule

__all__ = ["read", "rule", "write"]


class _Translation(NamedTuple):
    """Steps that translate indices into a block: `here` are indices into it, `elsewhere` is true for those outside."""

    steps: tuple[Step, ...]
    here: Out
    elsewhere: Out


def _translate(
    index: Slot, size: int, start: int, rows: int, *, wraps: bool = False, at: int = 0, outside: int = 0
) -> _Translation:
    """Translate indices into a dim of `size` for a rank that has `rows` rows from `start` on.

    The steps begin at number `at` of the program. Indices outside the block become `outside`. `wraps`: negative
    indices count from the end. An index out of range is an error on every rank, as on one device: it is looked up in
    an expanded table of the full size, which takes no memory.
    """
    lookup = "aten.index.Tensor" if wraps else "aten.embedding.default"
    check: tuple[Step, ...] = (
        ("aten.new_zeros.default", (index, [1] if wraps else [1, 1]), {}),
        ("aten.expand.default", (Out(at), [size] if wraps else [size, 1]), {}),
        (lookup, (Out(at + 1), [index] if wraps else index), {}),
    )
    wrap: tuple[Step, ...] = (("aten.remainder.Scalar", (index, max(size, 1)), {}),) if wraps else ()
    at += len(check) + len(wrap)
    return _Translation(
        (
            *check,
            *wrap,
            ("aten.sub.Scalar", (Out(at - 1) if wraps else index, start), {}),
            ("aten.lt.Scalar", (Out(at), 0), {}),
            ("aten.ge.Scalar", (Out(at), rows), {}),
            ("aten.logical_or.default", (Out(at + 1), Out(at + 2)), {}),
            ("aten.masked_fill.Scalar", (Out(at), Out(at + 3), outside), {}),
        ),
        here=Out(at + 4),
        elsewhere=Out(at + 3),
    )


def rule(
    inputs: tuple[Letters, ...], output: Letters, local: Callable[[Call, Place], Local | None] | None
) -> Rule:
    """The rule of a read at indices; with a `local` program, the dim of letter v may be split."""
    return Rule(
        inputs,
        (output,),
        reduced={"v": "sum"} if local else {},
        linear=(frozenset({0}),),
        local=local,
        ranges=frozenset({"v"}),
    )


def read(
    call: Call,
    place: Place,
    d: int,
    index: Slot,
    op: Callable[[Out], Step],
    trailing: int,
    wraps: bool = False,
) -> Local | None:
    """Read at indices into dim `d`, of letter v, of the first tensor: 0 for those outside the block.

    `op` reads at indices into the block; `trailing` is the number of dims of its result after those of the index.
    """
    if "v" not in place.sharded:
        return None
    rows = place.inputs[0][d]
    steps, here, mask = _translate(index, call.shapes[0][d], place.starts[0][d], rows, wraps=wraps)
    if rows == 0:
        return Local((*steps, ("aten.new_zeros.default", (Slot(0), list(place.outputs[0])), {})))
    program = [*steps, op(here)]
    values = Out(len(steps))
    for _ in range(trailing):
        program.append(("aten.unsqueeze.default", (mask, -1), {}))
        mask = Out(len(program) - 1)
    return Local((*program, ("aten.masked_fill.Scalar", (values, mask, 0), {})))


def write(
    call: Call,
    place: Place,
    indices: dict[int, tuple[str, Slot]],
    op: Callable[[Out, dict[int, Out]], Step],
    wraps: bool,
) -> Local | None:
    """Write at indices into the first tensor: those outside the block go to an extra row, which is then dropped.

    `indices` has the letter and the index of each indexed dim. `op` writes to a target at indices into the block, given
    by dim.
    """
    split = {d: index for d, (letter, index) in indices.items() if letter in place.sharded}
    if not split:
        return None
    program: list[Step] = []
    target: Any = Slot(0)
    shape, here = list(place.inputs[0]), {}
    for d, index in split.items():
        rows = shape[d]
        extra = [1 if i == d else n for i, n in enumerate(shape)]
        program.append(("aten.new_zeros.default", (Slot(0), extra), {}))
        program.append(("aten.cat.default", ([target, Out(len(program) - 1)], d), {}))
        target = Out(len(program) - 1)
        shape[d] += 1
        found = _translate(
            index, call.shapes[0][d], place.starts[0][d], rows, wraps=wraps, at=len(program), outside=rows
        )
        program += found.steps
        here[d] = found.here
    program.append(op(target, here))
    for d in split:
        program.append(("aten.slice.Tensor", (Out(len(program) - 1), d, 0, place.inputs[0][d]), {}))
    # a copy, so that the block is contiguous and does not keep the extra rows alive
    return Local((*program, ("aten.clone.default", (Out(len(program) - 1),), {})))
