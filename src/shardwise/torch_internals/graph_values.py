"""Values in the graphs of `torch.compile`: classes whose instances are constants, and a stable text of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.opaque_object import is_opaque_type, register_opaque_type
from torch.distributed.device_mesh import DeviceMesh

from shardwise.torch_internals.mesh import sibling_ranks

__all__ = ["describe_by", "describe_constant", "graph_value", "register_value"]

_texts: dict[type, Callable[[Any], str]] = {}
_values: dict[str, Any] = {}


def register_value(cls: type, text: Callable[[Any], str] = repr) -> None:
    """Have `torch.compile` take the instances of a class as constants, which it compares by `==`.

    Args:
        cls: a class of immutable values, with `__eq__` and `__hash__`.
        text: describes an instance completely, and in the same way in every process.
    """
    _texts[cls] = text
    cls.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
    if not is_opaque_type(cls):
        register_opaque_type(cls, typ="value")


def describe_by(cls: type, text: Callable[[Any], str]) -> None:
    """Say how instances of a class are described where they are constants of a call; they are compared by identity."""
    _texts[cls] = text


def _fx_repr(value: Any) -> tuple[str, dict[str, Any]]:
    """The expression by which the code of a graph refers to a value, and the names in it."""
    text = describe_constant(value)
    _values[text] = value
    return f"graph_value({text!r})", {"graph_value": graph_value}


def graph_value(text: str) -> Any:
    """The value that a graph refers to by its text."""
    return _values[text]


def describe_constant(value: Any) -> str:
    """A text of a constant, the same in every process that runs the program.

    >>> describe_constant([None, 2, {"a": (max,)}])
    "[None, 2, {'a': (builtins.max)}]"
    """
    text = _texts.get(type(value))
    if text is not None:
        return text(value)
    match value:
        case DeviceMesh():
            names = value.mesh_dim_names
            return f"mesh({value.device_type}, {names}, {tuple(value.shape)}, {sibling_ranks(value)})"
        case list():
            return f"[{', '.join(map(describe_constant, value))}]"
        case dict():
            return "{" + ", ".join(f"{k!r}: {describe_constant(v)}" for k, v in value.items()) + "}"
        case tuple():
            return f"({', '.join(map(describe_constant, value))})"
        case _ if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
