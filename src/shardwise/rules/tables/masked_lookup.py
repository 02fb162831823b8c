"""Looking up in a dim of which a rank has only a range: where an index points there, and where elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.rules.call import Out, Slot

__all__ = ["Found", "Step", "looked_up"]

Step = tuple[str, tuple[Any, ...], Mapping[str, Any]]


class Found(NamedTuple):
    """Steps of a local program; `here` counts from the block's begin, and is `instead` where `elsewhere` is true."""

    steps: tuple[Step, ...]
    here: Out
    elsewhere: Out


def looked_up(
    index: Slot, size: int, start: int, rows: int, *, wraps: bool = False, at: int = 0, instead: int = 0
) -> Found:
    """How a rank that has `rows` rows from `start` on reads an index into all `size`, from the `at`-th step on.

    An index that points nowhere is an error on each rank that has it, as it is on one device: looked up in a table of
    that size which takes no memory.
    """
    last = "aten.index.Tensor" if wraps else "aten.embedding.default"
    check: tuple[Step, ...] = (
        ("aten.new_zeros.default", (index, [1] if wraps else [1, 1]), {}),
        ("aten.expand.default", (Out(at), [size] if wraps else [size, 1]), {}),
        (last, (Out(at + 1), [index] if wraps else index), {}),
    )
    at += len(check)
    # from the end, where negative
    front: tuple[Step, ...] = (("aten.remainder.Scalar", (index, max(size, 1)), {}),) if wraps else ()
    at += len(front)
    return Found(
        (
            *check,
            *front,
            ("aten.sub.Scalar", (Out(at - 1) if wraps else index, start), {}),
            ("aten.lt.Scalar", (Out(at), 0), {}),
            ("aten.ge.Scalar", (Out(at), rows), {}),
            ("aten.logical_or.default", (Out(at + 1), Out(at + 2)), {}),
            ("aten.masked_fill.Scalar", (Out(at), Out(at + 3), instead), {}),
        ),
        here=Out(at + 4),
        elsewhere=Out(at + 3),
    )
