"""Steps that change Python objects: a program would do so once, when it is captured, so they are found and refused."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.compile.errors import CaptureError
from shardwise.compile.signature import REFERENCES

__all__ = ["unchanged_objects"]

_SIMPLE = (int, float, bool, str, bytes, complex, type(None))
_CONTAINERS = (list, dict, set, types.SimpleNamespace)
_MISSING = object()


class _Place(NamedTuple):
    """A container, how to call it, and what it contained: by key, or in order."""

    holder: Any
    name: str
    before: Any


@contextmanager
def unchanged_objects(step: Callable[..., Any], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse a step that changes Python objects which a program does not: they are restored, and an error says which.

    These are the attributes of modules, and the lists, dicts, sets, counters and attributes of objects that the step, the modules'
    hooks or the functions that they call by name refer to directly.
    """
    places = _places(step, modules)
    try:
        yield
    except BaseException:
        for place in places:
            _restore(place)
        raise
    changed = [f"{place.name}{_difference(place)}" for place in places if _difference(place) is not None]
    if changed:
        for place in places:
            _restore(place)
        raise CaptureError(
            f"The step changes {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}.",
            why=f"A program would change {changed[0]} once, when it is captured, and not in each run.",
            fix="Do it outside of the step, or with tensors in place: a buffer that the step adds to.",
        )


def _places(step: Callable[..., Any], modules: Sequence[nn.Module]) -> list[_Place]:
    found: dict[int, _Place] = {}

    def add(holder: Any, name: str) -> None:
        if id(holder) not in found:
            found[id(holder)] = _Place(holder, name, _content(holder))

    for number, root in enumerate(modules):
        for name, module in root.named_modules():
            called = name or (type(root).__name__ if len(modules) == 1 else f"{type(root).__name__} {number}")
            add(module.__dict__, f"{called}.")
            for key, value in list(module.__dict__.items()):
                if (type(value) in _CONTAINERS or isinstance(value, dict)) and key not in REFERENCES:
                    add(value, f"{called}.{key}")
            hooks = [v for k, v in module.__dict__.items() if k.endswith("_hooks") and isinstance(v, dict)]
            _add_function(type(module).forward, add, set())
            for hook in [h for some in hooks for h in some.values()]:
                _add_function(hook, add, set())
    _add_function(step, add, set())
    return list(found.values())


def _add_function(function: Any, add: Callable[[Any, str], None], seen: set[int], depth: int = 0) -> None:
    """Add what a function refers to: its closure, the globals that its code names, and the object that it is a method of."""
    if id(function) in seen or depth > 4:
        return
    seen.add(id(function))
    while hasattr(function, "func") and not isinstance(function, types.FunctionType):  # functools.partial
        function = function.func
    if isinstance(function, types.MethodType):
        _add_value(function.__self__, "an object", add, seen, depth)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        if not isinstance(function, type) and type(function).__module__.split(".")[0] not in _LIBRARIES:
            _add_value(function, type(function).__name__, add, seen, depth)
        return
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        _add_function(wrapped, add, seen, depth + 1)
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        add(cell, name)
        _add_value(_cell_content(cell), name, add, seen, depth)
    used = [n for n in function.__code__.co_names if n in function.__globals__]
    own = {n: function.__globals__[n] for n in used}
    if own:
        add(_Globals(function.__globals__, tuple(own)), function.__module__)
    for name, value in own.items():
        _add_value(value, name, add, seen, depth)


_LIBRARIES = frozenset({"torch", "shardwise", "numpy", "builtins"})


def _add_value(value: Any, name: str, add: Callable[[Any, str], None], seen: set[int], depth: int) -> None:
    if type(value) in _CONTAINERS:
        add(value, name)
    elif isinstance(value, types.FunctionType | types.MethodType):
        _add_function(value, add, seen, depth + 1)
    elif isinstance(value, Tensor | nn.Module | torch.optim.Optimizer | types.ModuleType | type):
        return
    elif type(value).__module__.split(".")[0] not in _LIBRARIES and hasattr(value, "__dict__"):
        if id(value) in seen:
            return
        seen.add(id(value))
        add(value.__dict__, f"{name}.")
        for key, inner in list(value.__dict__.items()):
            if type(inner) in _CONTAINERS:
                add(inner, f"{name}.{key}")


class _Globals(NamedTuple):
    """Some names of a module."""

    space: dict[str, Any]
    names: tuple[str, ...]


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _MISSING


def _content(holder: Any) -> Any:
    match holder:
        case dict():
            return dict(holder)
        case list():
            return list(holder)
        case set():
            return set(holder)
        case _Globals(space, names):
            return {n: space.get(n, _MISSING) for n in names}
        case types.SimpleNamespace():
            return dict(vars(holder))
        case _:
            return {"": _cell_content(holder)}


def _difference(place: _Place) -> str | None:
    """The key under which something changed, as text; None if nothing did."""
    before, now = place.before, _content(place.holder)
    if isinstance(before, set):
        return None if before == now else ""
    if isinstance(before, list):
        before, now = dict(enumerate(before)), dict(enumerate(now))
        return None if _changed_key(before, now) is None else ""
    key = _changed_key(before, now)
    return (
        None
        if key is None
        else str(key)
        if place.name.endswith(".") or isinstance(place.holder, _Globals)
        else ""
    )


def _changed_key(before: dict[Any, Any], now: dict[Any, Any]) -> Any:
    for key in (*before, *now):
        if not _is_same(before.get(key, _MISSING), now.get(key, _MISSING)) and not _is_ours(key):
            return key
    return None


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SIMPLE) and (a == b or a != a))


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and (key.startswith("_shardwise") or key in REFERENCES)


def _restore(place: _Place) -> None:
    if _difference(place) is None:
        return
    holder, before = place.holder, place.before
    match holder:
        case dict():
            holder.clear()
            holder.update(before)
        case list():
            holder[:] = before
        case set():
            holder.clear()
            holder.update(before)
        case _Globals(space, _):
            space.update({k: v for k, v in before.items() if v is not _MISSING})
        case types.SimpleNamespace():
            vars(holder).clear()
            vars(holder).update(before)
        case _ if before[""] is not _MISSING:
            holder.cell_contents = before[""]
