"""A call as rules see it: shapes and arguments, no tensors and no mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Local", "Out", "Slot"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in the arguments where the call has its `number`-th tensor."""

    number: int


@dataclass(frozen=True, slots=True)
class Out:
    """Stands in a local program for what its `step`-th op gave; `number` picks one of several."""

    step: int
    number: int | None = None


@dataclass(frozen=True)
class Call:
    """An op, its arguments by name with tensors as slots, and the global shapes that go in and come out.

    `tensors` has the arguments that take a tensor, in the order of the schema: a slot, None where the call has
    none, a tuple of slots for a list, or a number given in a tensor's place. `wanted` says of each output of the
    schema whether the call makes it; `outputs` has those it makes, `dtypes` and `made` the names of dtypes of what
    goes in and comes out.
    """

    op: str
    args: Mapping[str, Any]
    tensors: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    wanted: tuple[bool, ...] = ()
    dtypes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    def slots(self) -> list[tuple[int, ...]]:
        """The slots of each tensor argument, in the order of the schema."""
        out: list[tuple[int, ...]] = []
        for value in self.tensors:
            if isinstance(value, Slot):
                out.append((value.number,))
            elif isinstance(value, tuple):
                out.append(tuple(v.number for v in value if isinstance(v, Slot)))
            else:
                out.append(())
        return out

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """A `dim` argument as a tuple of dims counted from the front; all of them for None or an empty list."""
        ndim = len(self.shapes[0])
        value = self.args.get(name)
        if value is None or value == [] or value == ():
            return tuple(range(ndim))
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(sorted({d % ndim if ndim else 0 for d in listed}))


@dataclass(frozen=True)
class Local:
    """A small program for a block: ops by name, whose arguments are values, slots, and results of earlier steps."""

    steps: tuple[tuple[str, tuple[Any, ...], Mapping[str, Any]], ...]
    results: tuple[Any, ...] = ()
