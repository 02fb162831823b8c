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
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.torch_internals.graph_values import describe_constant, package_digest
from shardwise.torch_internals.module_fixer import after_import
from shardwise.torch_internals.subclass import is_parameter

__all__ = [
    "ScopedState",
    "call_in_graph",
    "call_while_tracing",
    "changes_state",
    "guard_by_metadata",
    "guard_state",
    "run_in_graph",
    "save_states",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"  # loaded when it is first used, which takes a second


class ScopedState(NamedTuple):
    """State that calls in a graph set and reset, such as the policy inside a `with` block."""

    read: Callable[[], Any]
    """What decisions depend on: compiled code is used again where this is equal."""
    save: Callable[[], Callable[[], None]]
    """Returns a function that restores the state as it is now."""


_in_graph: list[Any] = []
_while_tracing: list[Any] = []
_effects: set[Any] = set()
_states: list[ScopedState] = []
_usual_states: list[str] = []
MetadataCheck = Callable[[Any, list[int | None], list[int | None]], Callable[[Any], bool]]
_by_metadata: dict[type, MetadataCheck] = {}


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


def call_in_graph(function: _F, *, changes_state: bool = False) -> _F:
    """Have `torch.compile` put calls of a function into its graph. Its arguments are tensors, constants and lists of them.

    Args:
        function: the function; it returns a tensor, a list of tensors, or nothing.
        changes_state: the call has no result, but changes a `ScopedState`. It is called while the graph is built, too, so
            that what follows is traced in that state.

    >>> @call_in_graph
    ... def double(x):
    ...     return x * 2
    >>> double(2)
    4
    """
    _in_graph.append(function)
    if changes_state:
        _effects.add(function)
    _register_now(function, _handle)
    return function


def call_while_tracing(function: _F) -> _F:
    """Have `torch.compile` call a function itself, once, while it traces; its result is a constant of the graph.

    For functions that answer a question, or prepare something that outlives the call. Of tensors they may read what is known
    without their values, such as the layout; symbolic numbers among the arguments become values.

    >>> call_while_tracing(len)([1, 2])
    2
    """
    _while_tracing.append(function)
    _register_now(function, _handle_constant)
    return function


def guard_state(state: ScopedState) -> None:
    """Have compiled code that calls functions of this module, or has tensors of ours, be used again only in the same state."""
    _states.append(state)
    _usual_states.append(str(state.read()))


def changes_state(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is a call that changes a `ScopedState`."""
    return node.target is run_in_graph and _calls[str(node.args[0])].function in _effects


def save_states() -> Callable[[], None]:
    """A function that restores all states as they are now."""
    restore = [state.save() for state in _states]

    def restore_all() -> None:
        for function in restore:
            function()

    return restore_all


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
    text = key = f"{name}({', '.join(args)}){_state_text()}"
    number = 1
    while not _same(_calls.setdefault(key, call), call):
        number += 1
        key = f"{text} #{number}"
    return key


def _state_text() -> str:
    """The state of a call, where it is not the usual one: the same code computes something else in another state."""
    found = [str(state.read()) for state in _states]
    return "" if found == _usual_states else f" in {', '.join(found)}"


def _register_now(function: Callable[..., Any], handler: Any) -> None:
    if _DYNAMO in sys.modules and hasattr(torch._dynamo, "allow_in_graph"):
        _register(torch._dynamo, function, handler)


def _register(dynamo: Any, function: Callable[..., Any], handler: Any) -> None:
    """Tell dynamo to call a handler of ours where a function is called."""
    torch.compiler.allow_in_graph(function)
    dynamo.variables.TorchInGraphFunctionVariable._get_handlers()[function] = handler


def _register_all(dynamo: ModuleType) -> None:
    _guard_less(dynamo)
    _keep_parameters_static(dynamo)
    torch.fx.node.has_side_effect(run_in_graph)
    for function in _in_graph:
        _register(dynamo, function, _handle)
    for function in _while_tracing:
        _register(dynamo, function, _handle_constant)


def _keep_parameters_static(dynamo: Any) -> None:
    """Have the sizes of parameters that are tensors of our classes be constants, as those of `nn.Parameter` are."""
    builder = dynamo.variables.builder
    original = builder.tensor_always_has_static_shape

    def has_static_shape(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            type(tensor) in _by_metadata
            and is_parameter(tensor)
            and dynamo.config.force_parameter_static_shapes
        ):
            return True, dynamo.utils.TensorStaticReason.PARAMETER
        return original(tensor, *args, **kwargs)

    builder.tensor_always_has_static_shape = has_static_shape


def guard_by_metadata(cls: type, check: MetadataCheck) -> None:
    """Have the guards on a tensor of a class be those on its type, on its metadata and on its parts.

    They imply the others, which torch installs because it does not know what the class says of itself.

    Args:
        cls: the class.
        check: from a tensor, its sizes and its strides, with None where they are symbols in the compiled code, to a function
            that says of another tensor whether the code is for it, too. What it says of symbols is checked elsewhere.
    """
    _by_metadata[cls] = check


def _guard_less(dynamo: Any) -> None:
    _replace_metadata_guard(dynamo.guards)
    builder = dynamo.variables.builder.VariableBuilder
    original = builder.install_guards

    def install_guards(self: Any, *guards: Any) -> Any:
        kept = [g for g in guards if not _is_implied(g)]
        if len(kept) < len(guards):
            _watch_state(self.tx)
        return original(self, *kept)

    builder.install_guards = install_guards


def _replace_metadata_guard(guards: Any) -> None:
    """Have the guard on the metadata of a subclass be the check that the class has."""
    builder = guards.GuardBuilder
    original = builder.TENSOR_SUBCLASS_METADATA_MATCH

    @wraps(original)
    def match(self: Any, guard: Any) -> None:
        value = self.get(guard)
        make = _by_metadata.get(type(value))
        if make is None:
            original(self, guard)
            return
        known = self.check_fn_manager.output_graph.input_source_to_sizes_strides[guard.originating_source]
        size, stride = (guards.convert_to_concrete_values(known[k]) for k in ("size", "stride"))
        parts = guards.get_verbose_code_parts(f"{type(value).__name__} of {size}, {stride}", guard)
        check = make(value, size, stride)
        self.get_guard_manager(guard).add_lambda_guard(check, parts, guard.user_stack)

    builder.TENSOR_SUBCLASS_METADATA_MATCH = match


def _is_implied(guard: Any) -> bool:
    value: Any = getattr(guard, "keywords", {}).get("value")
    tensor = value() if type(value).__name__ == "TensorWeakRef" else None
    return type(tensor) in _by_metadata


def _handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """What dynamo does at a call of a function that is called in the graph."""
    dynamo: Any = torch._dynamo
    call, tensors = _call_of(variable.value, args, kwargs)
    _watch_state(tx)
    proxies, _ = dynamo.utils.proxy_args_kwargs(tensors, {})
    proxy = tx.output.create_proxy("call_function", run_in_graph, (_key(call), *proxies), {})
    # for AOTAutograd's cache: the text says all there is to the call
    proxy.node.meta.update(is_wrapped=True, user_cache_hash=package_digest())
    return dynamo.variables.builder.wrap_fx_proxy(tx=tx, proxy=proxy)


def _handle_constant(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """What dynamo does at a call of a function that is called while tracing."""
    call, tensors = _call_of(variable.value, args, kwargs, _value_of)
    _watch_state(tx)
    known = tuple(t.as_proxy().node.meta["example_value"] for t in tensors)
    filled, named = _fill((call.args, call.kwargs), known)
    result = call.function(*filled, **named)
    return torch._dynamo.variables.builder.SourcelessBuilder.create(tx, result)


def _value_of(variable: Any) -> Any:
    """The value of a symbolic number, on which the compiled code then depends."""
    return variable.evaluate_expr()


def _call_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: Callable[[Any], Any] | None = None
) -> tuple[_Call, list[Any]]:
    """A call with its constants, and the variables of its tensors; symbolic numbers count as tensors, or become `number`."""
    tensors: list[Any] = []
    frozen = tuple(_freeze(a, tensors, number) for a in args)
    return _Call(function, frozen, {k: _freeze(v, tensors, number) for k, v in kwargs.items()}), tensors


def _watch_state(tx: Any) -> None:
    """Before the first call in a graph: guard on the state as it is there, and restore it when tracing ends, however it ends."""
    if getattr(tx.output, "_shardwise_state", False):
        return
    tx.output._shardwise_state = True
    for state in _states:
        tx.output.add_cleanup_hook(state.save())
    dynamo: Any = torch._dynamo
    source = dynamo.source.AttrSource(tx.import_source(__name__), read_state.__name__)
    guard = dynamo.source.CallFunctionNoArgsSource(source).make_guard(dynamo.guards.GuardBuilder.EQUALS_MATCH)
    dynamo.guards.install_guard(guard)


def read_state() -> tuple[Any, ...]:
    """All states, as guards compare them."""
    return tuple([state.read() for state in _states])


def _freeze(variable: Any, tensors: list[Any], number: Callable[[Any], Any] | None) -> Any:
    """An argument as dynamo knows it, as a constant with places for tensors."""
    guards: Any = torch._dynamo.guards
    known: Any = torch._dynamo.variables
    variable = variable.realize()
    if number is not None and isinstance(variable, known.SymNodeVariable):
        return number(variable)
    if isinstance(variable, known.TensorVariable | known.SymNodeVariable):
        tensors.append(variable)
        return _Slot(len(tensors) - 1)
    if isinstance(variable, known.lists.BaseListVariable) and variable.python_type() in (
        list,
        tuple,
        torch.Size,
    ):
        items = [_freeze(v, tensors, number) for v in variable.items]
        return items if variable.python_type() is list else tuple(items)
    if isinstance(variable, known.ConstDictVariable):
        return {k.vt.as_python_constant(): _freeze(v, tensors, number) for k, v in variable.items.items()}
    if (
        type(variable) is known.UserDefinedObjectVariable
        or isinstance(variable, known.UnspecializedNNModuleVariable | known.NNModuleVariable)
        or _is_mesh(variable)
    ):
        value = getattr(variable.value, "real_obj", variable.value)
        if variable.source is not None:
            guards.install_guard(variable.source.make_guard(guards.GuardBuilder.ID_MATCH))
        return value
    return variable.as_python_constant()


def _is_mesh(variable: Any) -> bool:
    value = getattr(variable, "value", None)
    return isinstance(getattr(value, "real_obj", value), DeviceMesh)


after_import(_DYNAMO, _register_all)
