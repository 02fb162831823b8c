"""Steps that change Python objects: a program would do so once, when it is captured, so they are found and refused."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.compile.errors import CaptureError
from shardwise.compile.signature import REFERENCES

__all__ = ["unchanged_objects", "values_read"]

_SIMPLE = (int, float, bool, str, bytes, complex, type(None))
_CONTAINERS = (list, dict, set, types.SimpleNamespace)
_ITERATORS: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter("")),
    type(reversed([])),
)
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
    streams = _python_streams()
    try:
        yield
    except BaseException:
        for place in places:
            _restore(place)
        _restore_streams(streams)
        raise
    _check_streams(streams)
    changed = [f"{place.name}{_difference(place)}" for place in places if _difference(place) is not None]
    if changed:
        for place in places:
            _restore(place)
        raise CaptureError(
            f"The step changes {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}.",
            why=f"A program would change {changed[0]} once, when it is captured, and not in each run.",
            fix="Do it outside of the step, or with tensors in place: a buffer that the step adds to.",
        )


def values_read(function: Callable[..., Any]) -> list[Any]:
    """What a function, and the functions that it calls by name, may read now of objects that they refer to.

    These are the contents of closures, of globals that their code names, of lists and dicts, and the attributes that it names.
    """
    holders: list[Any] = []
    names: set[str] = set()

    def add(holder: Any, name: str) -> None:
        if isinstance(holder, types.CodeType):
            names.update(holder.co_names)
        else:
            holders.append((holder, name.endswith(".")))

    _add_function(function, add, set())
    out: list[Any] = []
    for holder, is_object in holders:
        content = _content(holder)
        if isinstance(content, dict):
            out += [v for k, v in content.items() if not is_object or k in names]
        elif not isinstance(content, set):
            out += content
    return out


_Stream = tuple[str, Any, Callable[[Any], None]]


def _python_streams() -> list[_Stream]:
    """The random streams of Python and of numpy: a name, the state, and what sets it."""
    out: list[_Stream] = [("random", random.getstate(), random.setstate)]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        out.append(("numpy.random", _numpy_state(numpy), numpy.set_state))
    return out


def _numpy_state(numpy: Any) -> Any:
    kind, keys, *rest = numpy.get_state()
    return (kind, tuple(keys.tolist()), *rest)


def _restore_streams(before: Sequence[_Stream]) -> list[str]:
    """Set streams to what they were; returns the names of those that were something else."""
    now = {name: state for name, state, _ in _python_streams()}
    moved = [name for name, state, _ in before if now[name] != state]
    for name, state, set_state in before:
        if name in moved:
            set_state(state)
    return moved


def _check_streams(before: Sequence[_Stream]) -> None:
    if moved := _restore_streams(before):
        raise CaptureError(
            f"The step draws numbers from {moved[0]}.",
            why=f"A program has the numbers that {moved[0]} gave when it was captured, and each run would use them again.",
            fix="Draw them outside of the step and pass them as arguments, or draw tensors: torch.rand_like(x).",
        )


def _places(step: Callable[..., Any], modules: Sequence[nn.Module]) -> list[_Place]:
    found: dict[int, _Place] = {}

    def add(holder: Any, name: str) -> None:
        if id(holder) not in found and not isinstance(holder, types.CodeType):
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
    for code in _codes(function.__code__):
        add(code, "")
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


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those that are defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


_LIBRARIES = frozenset({"torch", "shardwise", "numpy", "builtins"})


def _add_value(value: Any, name: str, add: Callable[[Any, str], None], seen: set[int], depth: int) -> None:
    if type(value) in (*_CONTAINERS, *_ITERATORS):
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
        of_classes = [item for c in type(value).__mro__ for item in vars(c).items()]
        for key, inner in [*value.__dict__.items(), *of_classes]:
            if type(inner) in (*_CONTAINERS, *_ITERATORS):
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
        case _ if type(holder) in _ITERATORS:
            return holder.__reduce__()[2:]  # where it is
        case _:
            return {"": _cell_content(holder)}


def _difference(place: _Place) -> str | None:
    """The key under which something changed, as text; None if nothing did."""
    before, now = place.before, _content(place.holder)
    if isinstance(before, set | tuple):
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
        case _ if type(holder) in _ITERATORS:
            if before:  # else it was at the end
                holder.__setstate__(*before)
        case _ if before[""] is not _MISSING:
            holder.cell_contents = before[""]
