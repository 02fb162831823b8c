"""Functions that `torch.compile` calls from its graph instead of tracing their Python code.

`torch.compile` executes Python code symbolically. Code that looks things up in caches of interned values, reads context
variables or takes part in autograd is better run as it is: the graph then has one call of it, and AOTAutograd, which runs
that call on tensors without values, sees the ops on blocks. Arguments that are not tensors are constants of the call. They
are kept here under a text that describes them, which is all that the graph has of them: the text is the same in another
process, and so caches of compiled code hit there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.torch_internals.graph_values import describe_constant
from shardwise.torch_internals.module_fixer import ModuleFixer

__all__ = ["call_in_graph", "run_in_graph"]

_F = TypeVar("_F", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"  # loaded when it is first used, which takes a second
_functions: dict[Any, Callable[[], None] | None] = {}

class _Slot:
    """The place of a tensor among the arguments of a call."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"t{self.index}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and other.index == self.index

    __hash__ = None  # type: ignore[assignment]


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any


_calls: dict[str, _Call] = {}


def call_in_graph(function: _F, *, undo: Callable[[], None] | None = None) -> _F:
    """Have `torch.compile` put calls of a function into its graph. Its arguments are tensors, constants and lists of them.

    Args:
        function: the function; it returns a tensor, a list of tensors, or nothing.
        undo: called when tracing has ended, if the call has an effect: the function is called while the graph is built, too.

    >>> @call_in_graph
    ... def double(x):
    ...     return x * 2
    >>> double(2)
    4
    """
    _functions[function] = undo
    if _DYNAMO in sys.modules and hasattr(torch._dynamo, "allow_in_graph"):
        _register(torch._dynamo, function)
    return function


def run_in_graph(key: str, *tensors: Any) -> Any:
    """Run a call that was put into a graph."""
    call = _calls[key]
    args, kwargs = _fill((call.args, call.kwargs), tensors)
    return call.function(*args, **kwargs)


def _fill(value: Any, tensors: tuple[Any, ...]) -> Any:
    """Arguments with the tensors in their places."""
    match value:
        case _Slot():
            return tensors[value.index]
        case list():
            return [_fill(v, tensors) for v in value]
        case dict():
            return {k: _fill(v, tensors) for k, v in value.items()}
        case tuple() if type(value) is tuple:
            return tuple(_fill(v, tensors) for v in value)
    return value


def _same(a: Any, b: Any) -> bool:
    """Whether the constants of two calls are the same values; meshes and functions are the same objects."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return a is b or (not isinstance(a, DeviceMesh) and bool(a == b))


def _key(call: _Call) -> str:
    """The text under which a call is kept: what it does, and a number if another call has the same text."""
    name = f"{call.function.__module__}.{call.function.__qualname__}".removeprefix("shardwise.")
    args = [describe_constant(a) for a in call.args]
    args += [f"{k}={describe_constant(v)}" for k, v in call.kwargs.items()]
    text = key = f"{name}({', '.join(args)})"
    number = 1
    while not _same(_calls.setdefault(key, call), call):
        number += 1
        key = f"{text} #{number}"
    return key


def _register(module: ModuleType, function: Callable[..., Any]) -> None:
    """Tell dynamo to put calls of a function into the graph, by our handler."""
    torch.compiler.allow_in_graph(function)
    handlers = module.variables.TorchInGraphFunctionVariable._get_handlers()
    handlers[function] = _handle


def _handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """What dynamo does at a call of a registered function."""
    dynamo: Any = torch._dynamo
    function = variable.value
    tensors: list[Any] = []
    call = _Call(
        function,
        tuple(_freeze(a, tensors) for a in args),
        {k: _freeze(v, tensors) for k, v in kwargs.items()},
    )
    undo = _functions[function]
    if undo is not None:
        tx.output.add_cleanup_hook(undo)
    proxies, _ = dynamo.utils.proxy_args_kwargs(tensors, {})
    proxy = tx.output.create_proxy("call_function", run_in_graph, (_key(call), *proxies), {})
    # for AOTAutograd's cache: the text says all there is to the call
    proxy.node.meta.update(is_wrapped=True, user_cache_hash="shardwise")
    return dynamo.variables.builder.wrap_fx_proxy(tx=tx, proxy=proxy)


def _freeze(variable: Any, tensors: list[Any]) -> Any:
    """An argument as dynamo knows it, as a constant with places for tensors."""
    guards: Any = torch._dynamo.guards
    known: Any = torch._dynamo.variables
    variable = variable.realize()
    if isinstance(variable, known.TensorVariable | known.SymNodeVariable):
        tensors.append(variable)
        return _Slot(len(tensors) - 1)
    if isinstance(variable, known.lists.BaseListVariable) and variable.python_type() in (list, tuple, torch.Size):
        items = [_freeze(v, tensors) for v in variable.items]
        return items if variable.python_type() is list else tuple(items)
    if isinstance(variable, known.ConstDictVariable):
        return {k.vt.as_python_constant(): _freeze(v, tensors) for k, v in variable.items.items()}
    if type(variable) is known.UserDefinedObjectVariable or _is_mesh(variable):
        value = getattr(variable.value, "real_obj", variable.value)
        if variable.source is not None:
            guards.install_guard(variable.source.make_guard(guards.GuardBuilder.ID_MATCH))
        return value
    return variable.as_python_constant()


def _is_mesh(variable: Any) -> bool:
    value = getattr(variable, "value", None)
    return isinstance(getattr(value, "real_obj", value), DeviceMesh)


def _register_all(module: ModuleType) -> None:
    torch.fx.node.has_side_effect(run_in_graph)
    for function in list(_functions):
        _register(module, function)


_hook = ModuleFixer({_DYNAMO: _register_all})
sys.meta_path.insert(0, _hook)
_hook.fix_loaded()
