"""Calls with symbolic sizes, in programs that a compiler traces for all sizes of a dim."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.call.arguments import map_leaves, tensors_in
from shardwise.layout.sizes import as_size, as_sizes
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.symbolic_specs import refreshed
from shardwise.torch_internals.symbolic_sizes import is_symbolic_number, value_of_symbol

__all__ = ["hashable_key", "is_symbolic", "symbolic_arguments"]


def is_symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a size of a DTensor, or a number, among some arguments is a symbol."""
    return any(_has_symbol(a) for a in args) or any(_has_symbol(a) for a in kwargs.values())


def _has_symbol(value: Any) -> bool:
    if isinstance(value, DTensor):
        return value._spec.is_symbolic
    if isinstance(value, list | tuple):
        return any(map(_has_symbol, value))
    if isinstance(value, torch.Tensor):
        return any(map(is_symbolic_number, value.shape))
    return is_symbolic_number(value)


def symbolic_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in which symbols have the form that they have in specs, and specs are as the compiler knows them now.

    Symbols that are not whole numbers become values, on which the compiled code then depends.
    """
    for t in tensors_in([*args, *kwargs.values()]):
        if isinstance(t, DTensor) and t._spec.is_symbolic:
            t._spec = refreshed(t._spec)
    return map_leaves(_in_form, args), map_leaves(_in_form, kwargs)


def _in_form(value: Any) -> Any:
    return as_size(value_of_symbol(value)) if is_symbolic_number(value) else value


def hashable_key(key: Any) -> Any:
    """A key of a call in which symbols have the form that they have in specs."""
    if isinstance(key, torch.Size):
        return as_sizes(key)
    if isinstance(key, tuple):
        return tuple(map(hashable_key, key))
    return as_size(key) if is_symbolic_number(key) else key
