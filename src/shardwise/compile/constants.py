"""Tensors whose values a step determines by itself: `torch.arange(8)`, a causal mask, and what is computed from such tensors alone.

They have their values while a step is captured, so that code which looks at them does what it does in eager mode: it may branch on
them, and finds plain tensors rather than fake ones. In the graph they are ops like any others. A constant that the step later writes
inputs to has no known value from there on, whatever other tensors share its memory; so the step is captured again without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.call.schema import op_info
from shardwise.torch_internals.pytree import tree_flatten
from shardwise.torch_internals.subclass import storage_id

__all__ = ["MOST_LINES", "ConstantWrittenError", "Constants", "is_factory"]

_FACTORIES = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in "arange eye full lift_fresh linspace ones scalar_tensor tril_indices triu_indices zeros".split()
    for overload in getattr(torch.ops.aten, name).overloads()
    if "out" not in overload
)
_MOST_ELEMENTS = 1 << 20
"""Larger constants are not computed while a step is captured."""
MOST_LINES = 8
"""So many lines are tried before a step is captured without constants."""


class ConstantWrittenError(BaseException):
    """The step writes inputs to a constant; `line` created it. Not an `Exception`, which code of the step might handle."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


def is_factory(func: Any) -> bool:
    """Whether an op creates a tensor of values that its arguments, which are not tensors, determine.

    >>> is_factory(torch.ops.aten.arange.default), is_factory(torch.ops.aten.rand.default)
    (True, False)
    """
    return func in _FACTORIES


class Constants:
    """The constants of a step, and the tensor without values that stands for each."""

    def __init__(self, excluded: frozenset[str]) -> None:
        self._known: dict[int, tuple[Tensor, Tensor, str]] = {}
        self._excluded = excluded
        self._memory: dict[int, tuple[Tensor, Tensor, str]] = {}
        """By storage, its bytes, a copy of them as ops left them, and the line that created it."""

    def __bool__(self) -> bool:
        return bool(self._known)

    def stand_in(self, x: Tensor) -> Tensor | None:
        """The tensor without values that stands for a constant; None for other tensors."""
        known = self._known.get(id(x))
        return None if known is None else known[1]

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether constants are among the arguments of a call."""
        return any(id(x) in self._known for x in _tensors((*args, *kwargs.values())))

    def determine(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether constants determine the result of a call."""
        if func is torch.ops.aten.lift_fresh.default:
            return True
        return torch.Tag.nondeterministic_seeded not in func.tags and all(
            id(x) in self._known for x in _tensors((*args, *kwargs.values()))
        )

    def check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give up if a call that they do not determine writes to one."""
        info = op_info(func)
        for i in info.written:
            name = info.arguments[i].name
            for x in _tensors([kwargs.get(name, args[i] if i < len(args) else None)]):
                self.check_write(x)

    def check_write(self, x: Tensor) -> None:
        """Give up if a tensor that is about to be written to is a constant."""
        if (known := self._known.get(id(x))) is not None:
            raise ConstantWrittenError(known[2])

    def check_alias(self, x: Tensor) -> None:
        """Give up if an unknown tensor shares memory with a constant, as `constant.data` does: it could be written to."""
        if (known := self._memory.get(storage_id(x))) is not None:
            raise ConstantWrittenError(known[2])

    def check_memory(self) -> None:
        """Give up if the memory of a constant was written to other than by ops, such as through NumPy."""
        for now, copy, line in self._memory.values():
            if not torch.equal(now, copy):
                raise ConstantWrittenError(line)

    def are_wanted(self, out: Any) -> bool:
        """Whether to compute the values of results that were inferred without."""
        return all(x.numel() <= _MOST_ELEMENTS and x.device.type == "cpu" for x in _tensors([out]))

    def keep(self, out: Any, inferred: Any, line: str) -> Any:
        """Remember the results of a call and what stands for them; returns what the step gets.

        A result that is a view of a constant always has its values, since the step may write to it.
        """
        pairs = [
            (x, fake)
            for x, fake in zip(tree_flatten(out)[0], tree_flatten(inferred)[0], strict=True)
            if isinstance(x, Tensor)
        ]
        if line in self._excluded and not any(storage_id(x) in self._memory for x, _ in pairs):
            return inferred
        for x, fake in pairs:
            bytes_of = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            _, _, first = self._memory.get(storage_id(x), (x, x, line))
            self._memory[storage_id(x)] = (bytes_of, bytes_of.clone(), first)
            self._known.setdefault(id(x), (x, fake, first))
        return out


def _tensors(values: Any) -> Iterator[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, list | tuple):
            yield from _tensors(v)
