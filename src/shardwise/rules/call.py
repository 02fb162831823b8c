"""An op call as rules see it: shapes, dtypes and arguments, without tensors or a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Local", "Out", "Slot", "Step"]

Shape = tuple[int, ...]
Step = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""One op of a local program: its name, positional arguments and keyword arguments."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder for the call's `number`-th tensor."""

    number: int


@dataclass(frozen=True, slots=True)
class Out:
    """Placeholder for the result of a local program's `step`-th op, or for its output `number` if it has several."""

    step: int
    number: int | None = None


@dataclass(frozen=True)
class Call:
    """An op call: arguments by name, with slots for tensors, and the global shapes of inputs and outputs.

    `tensors` has one entry per tensor argument of the schema: a slot, None if it is left out, a tuple of slots for a
    list, or a number passed in place of a tensor. `wanted` tells for each output of the schema whether the call
    computes it; `outputs` are the shapes of those that it computes. `dtypes` and `output_dtypes` are the names of the
    dtypes of the inputs and of these outputs.
    """

    op: str
    args: Mapping[str, Any]
    tensors: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    wanted: tuple[bool, ...] = ()
    dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()

    def slots(self) -> list[tuple[int, ...]]:
        """The slot numbers of each tensor argument, in the order of the schema."""
        out: list[tuple[int, ...]] = []
        for value in self.tensors:
            values = value if isinstance(value, tuple) else (value,)
            out.append(tuple(v.number for v in values if isinstance(v, Slot)))
        return out

    def step(self, **changes: Any) -> Step:
        """The step of a local program that runs the op with some of its arguments changed."""
        return self.op, tuple({**self.args, **changes}.values()), {}

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """A dim argument as a non-negative index into `ndim` dims, by default those of the first tensor."""
        return int(self.args[name]) % max(len(self.shapes[0]) if ndim is None else ndim, 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """An argument of one or several dims as sorted non-negative indices; all dims for None or an empty list."""
        ndim = len(self.shapes[0])
        value = self.args.get(name)
        if value is None or value == [] or value == ():
            return tuple(range(ndim))
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(sorted({d % ndim if ndim else 0 for d in values}))


@dataclass(frozen=True)
class Local:
    """A program that a rank runs on its blocks in place of the op; `results` defaults to the last step's result.

    The arguments of a step are values, slots, and results of earlier steps.
    """

    steps: tuple[Step, ...]
    results: tuple[Any, ...] = ()
