"""The key of a call: everything that its route may depend on, except what is checked on every call.

A key has the spec of each DTensor and the other arguments, by value where the op's rule reads them and by type where it does
not. The cost model selects the table that is searched. A plain tensor's part of the key has the policy and whether a
backward pass runs. Grad mode, inference mode and the default dtype are checked on every call where a route depends on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.call.operands import plain_key
from shardwise.call.route import Route, Run
from shardwise.call.schema import op_info
from shardwise.ops.foreach import FUSED
from shardwise.ops.random_ops import random_program
from shardwise.rules.table import row_of
from shardwise.tensor.dtensor import DTensor

__all__ = ["LIST", "ONE_TENSOR", "OTHER", "TWO_TENSORS", "Entry", "call_key", "new_entry", "specs_of"]

ONE_TENSOR = object()  # a tensor, then arguments that are hashable and compare by value: sizes, flags, dims
TWO_TENSORS = object()  # two tensors first
LIST = object()  # a list of tensors, then arguments that compare by value
OTHER = object()


class Entry(NamedTuple):
    """The cached routes of an op, and how the keys of its calls are computed."""

    func: Any  # kept alive, so that its id stays its own
    by_type: bool  # its rule reads no numbers, so only their types count
    form: object
    is_view: bool
    runs: dict[Any, Run]
    routes: dict[Any, Route]


_BY_VALUE = frozenset(
    {"int", "SymInt", "bool", "float", "str", "ScalarType", "MemoryFormat", "Device", "Layout"}
)
_FEW_VALUES = frozenset(
    {"memory_format", "dtype", "layout", "device", "pin_memory"}
)  # int or bool in schemas


def new_entry(func: Any) -> Entry:
    """The entry of an op that is seen for the first time.

    Arguments compare by value where the schema says int or bool. A Scalar may be 1, 1.0 or True, which are equal and yet
    different arguments.
    """
    info = op_info(func)
    by_type = _reads_types_only(func)
    first, *rest = [a.type.replace("Optional[", "").rstrip("]") for a in info.arguments] or [""]
    by_value = all(
        t in _BY_VALUE or (i == 0 and first == "Tensor" and t in ("List[int", "List[SymInt"))
        for i, t in enumerate(rest)
    )
    has_few_values = all(a.name in _FEW_VALUES or a.type == "str" for a in info.arguments[1:])
    form = OTHER
    if first == "Tensor" and rest[:1] == ["Tensor"]:
        form = TWO_TENSORS
    elif by_value and first == "List[Tensor":
        form = LIST
    elif by_value and first == "Tensor" and (not by_type or has_few_values):
        form = ONE_TENSOR
    return Entry(func, by_type, form, info.is_view, {}, {})


def _reads_types_only(func: Any) -> bool:
    info = op_info(func)
    if info.qualified_name.startswith("aten::_foreach_") or info.qualified_name in FUSED:
        return True
    if random_program(func) is not None:
        return True
    row = row_of(info.name) or row_of(info.rule_name)
    return row is not None and not row.reads


_IDENTICAL = frozenset({int, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})
_NUMBERS = (int, float, bool, complex)


def call_key(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of a call; `dispatch` computes the commonest forms of it in place."""
    by_type, form = entry[1], entry[2]
    if form is ONE_TENSOR and isinstance(args[0], DTensor):
        key: Any
        if len(args) == 1:
            key = args[0]._spec
        elif type(args[1]) is list:
            key = (args[0]._spec, *args[1], args[2:])
        else:
            key = (args[0]._spec, args[1:])
        return (key, *kwargs, *kwargs.values()) if kwargs else key
    if not kwargs and form is LIST and (specs := specs_of(args[0])) is not None:
        return (args[1:], specs)
    parts: list[Any] = []
    for a in args:  # the commonest parts in place
        kind = type(a)
        if kind is DTensor:
            parts.append(a._spec)
        elif kind is float:
            parts.append(float if by_type else (float, a))
        elif kind is list and a and type(a[0]) is DTensor and (specs := specs_of(a)) is not None:
            parts.append(specs)
        else:
            parts.append(_part(a, by_type))
    for k, v in kwargs.items():
        parts.append(k)
        parts.append(_part(v, by_type))
    return tuple(parts)


def specs_of(tensors: Any) -> tuple[Any, ...] | None:
    """The specs of a list of DTensors; None if it contains anything else."""
    try:
        return tuple([t._spec for t in tensors])
    except AttributeError:
        return None


def _part(value: Any, by_type: bool) -> Any:
    """An argument as part of a key: equal numbers of different types differ."""
    kind = type(value)
    if kind is DTensor:
        return value._spec
    if kind in _IDENTICAL:
        return int if by_type and kind is int else value
    if kind is float or kind is bool:
        return kind if by_type else (kind, value)
    if kind is list or kind is tuple:
        first = type(value[0]) if value else None
        if first is not None and issubclass(first, DTensor) and (specs := specs_of(value)) is not None:
            return specs
        if first is int and not by_type:
            return tuple(value)  # sizes or dims: if one is an int, all are
        if first is float and by_type and {type(v) for v in value} == {float}:
            return float, len(value)
        return tuple([_part(v, by_type) for v in value])
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, Tensor):
        return plain_key(value)
    return kind if by_type and kind in _NUMBERS else (kind, value)
