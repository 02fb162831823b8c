"""Mapping a function over the tensors in the arguments and results of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from torch import Tensor

from shardwise.torch_internals.pytree import flatten

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with `fn` applied to its tensors: lists, tuples, named tuples, mappings, dataclasses, and what torch knows.

    A part without changes is the same object.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, {"a": (torch.zeros(1), None)})
    {'a': (tensor([1.]), None)}
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(fn, v) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {k: new for k, v in value.items() if (new := map_tensors(fn, v)) is not v}
        if not changed:
            return value
        out = copy(value)
        for k, v in changed.items():
            out[k] = v  # type: ignore[index]
        return out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {k: new for k, v in fields.items() if (new := map_tensors(fn, v)) is not v}
        return dataclasses.replace(value, **changed) if changed else value
    leaves, rebuild = flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    items = [map_tensors(fn, v) for v in leaves]
    return value if all(a is b for a, b in zip(items, leaves, strict=True)) else rebuild(items)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in such a structure."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(note, value)
    return iter(found)
