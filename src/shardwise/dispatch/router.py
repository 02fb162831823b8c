"""The hot path: from an op on DTensors to ops on blocks, by one look-up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.call.op_call import OpCall
from shardwise.call.route import Route, Run
from shardwise.call.symbolic_call import hashable_key, is_symbolic, symbolic_arguments
from shardwise.call.view_mode import mode_of_view
from shardwise.call.writes import note_writes, watched
from shardwise.comm.recording import recorders
from shardwise.comm.simulate import at_simulation_end
from shardwise.dispatch.dry_run import cacheable
from shardwise.dispatch.failure import note_failure
from shardwise.dispatch.fast_path import Recipe, recipe_of
from shardwise.dispatch.key import LIST, ONE_TENSOR, TWO_TENSORS, Entry, call_key, new_entry, specs_of
from shardwise.dispatch.routes import decide
from shardwise.plan.settings import active, current_settings, forget_decisions, inherited
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.inference import in_inference_mode, inference_tensors, note_inference_mode
from shardwise.tensor.inference_data import data_of_inference_tensor
from shardwise.torch_internals.symbolic_sizes import untraced

__all__ = ["dispatch", "find_recipe", "find_route", "on_direct_route"]

_MAX_ROUTES = 4096  # per op
on_direct_route: list[Callable[[Entry], None]] = []
"""Called with the entry of an op for which a direct run was chosen."""
_DETACH = torch.ops.aten.detach.default
_NO_KWARGS: dict[str, Any] = {}
_FLOAT = [float]
_UNKNOWN = (
    KeyError,
    AttributeError,
    IndexError,
    TypeError,
)  # not cached, a plain tensor, a missing argument, an argument that cannot be hashed
at_simulation_end(lambda: forget_decisions(plans=False))  # routes refer to meshes, and these are gone


def dispatch(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an op on DTensors: find the route of calls like this one, or choose one, and take it."""
    try:
        if watched or inference_tensors or in_inference_mode():
            return _dispatch(func, args, kwargs or _NO_KWARGS)
        try:  # the commonest keys in place, others in `call_key`: equal calls must have equal keys either way
            entry, form, runs = (active.get() or inherited()).routes[id(func)]
            key: Any
            if kwargs:
                if form is ONE_TENSOR and len(args) == 1:
                    key = (args[0]._spec, *kwargs, *kwargs.values())
                elif (
                    form is TWO_TENSORS
                    and entry[1]
                    and [*map(type, kwargs.values())] == _FLOAT
                    and len(args) == 2
                ):
                    key = (args[0]._spec, args[1]._spec, *kwargs, float)  # an update of an optimizer
                else:
                    key = call_key(entry, args, kwargs)
            elif form is ONE_TENSOR:
                if len(args) == 1:
                    key = args[0]._spec
                elif type(args[1]) is list:
                    key = (args[0]._spec, *args[1], args[2:])
                else:
                    key = (args[0]._spec, args[1:])
            elif form is TWO_TENSORS:
                kind = type(args[1])
                if kind is DTensor:
                    if len(args) == 2:
                        key = (args[0]._spec, args[1]._spec)
                    elif len(args) == 3 and type(args[2]) is DTensor:
                        key = (args[0]._spec, args[1]._spec, args[2]._spec)
                    else:
                        key = call_key(entry, args, _NO_KWARGS)
                elif kind is float and len(args) == 2 and entry[1]:
                    key = (args[0]._spec, float)
                else:
                    key = call_key(entry, args, _NO_KWARGS)
            elif form is LIST and (specs := specs_of(args[0])) is not None:
                key = (args[1:], specs)
            else:
                key = call_key(entry, args, _NO_KWARGS)
            run = runs[key]
        except _UNKNOWN:
            return _dispatch(func, args, kwargs or _NO_KWARGS)
        return run(args, kwargs or _NO_KWARGS)
    except Exception as error:
        note_failure(error, func, args)
        raise


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dispatch` in every case: of a call that is not cached, in inference mode and after it, while moved views exist."""
    note_inference_mode()
    entry, _, runs = _entry_of((active.get() or inherited()).routes, func)
    if (
        entry.is_view
        and args[0].is_inference() is not in_inference_mode()
        and (mode := mode_of_view(func, args[0])) is not None
    ):
        if func is _DETACH and not in_inference_mode():
            return data_of_inference_tensor(args[0])
        with mode:
            return _dispatch(func, args, kwargs)
    key = call_key(entry, args, kwargs)
    run: Run | None
    try:
        run = runs.get(key)
    except TypeError:  # an argument that cannot be hashed: such calls are decided each time
        if is_symbolic(args, kwargs):
            return _dispatch_symbolic(func, args, kwargs)
        return decide(OpCall(func, args, kwargs), find_route)[1](args, kwargs)
    if run is None:
        if is_symbolic(args, kwargs):
            return _dispatch_symbolic(func, args, kwargs)
        run = _choose(entry, key, args, kwargs)[1]
    result = run(args, kwargs)
    if watched:
        note_writes(func, args, kwargs)
    return result


def _dispatch_symbolic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dispatch` of a call with symbolic sizes."""
    with untraced():
        args, kwargs = symbolic_arguments(args, kwargs)
        run = _find_symbolic(func, args, kwargs)[1]
    return run(args, kwargs)


def _find_symbolic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Route, Run]:
    entry = _entry_of(current_settings().decisions.symbolic_routes, func)[0]
    key = hashable_key(call_key(entry, args, kwargs))
    known = entry.routes.get(key)
    return _choose(entry, key, args, kwargs) if known is None else (known, entry.runs[key])


def _entry_of(entries: dict[int, Any], func: Any) -> tuple[Entry, object, dict[Any, Run]]:
    """The entry of an op and what the hot path reads of it, as a plain tuple: a named one is unpacked by iteration."""
    known = entries.get(id(func))
    if known is None:
        entry = new_entry(func)
        known = entries.setdefault(id(func), (entry, entry.form, entry.runs))
    return known  # type: ignore[no-any-return]


def _choose(entry: Entry, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Route, Run]:
    # meta kernels and dry runs on the way to a route are not part of a program that is being captured or traced
    with cacheable() as is_final, untraced(), recorders[-1].pause() if recorders else nullcontext():
        route, run = decide(OpCall(entry.func, args, kwargs), find_route)
    if not is_final():
        return route, run
    if len(entry.runs) >= _MAX_ROUTES:
        oldest = next(iter(entry.runs))
        entry.runs.pop(oldest, None)
        entry.routes.pop(oldest, None)
    entry.runs[key], entry.routes[key] = run, route
    if on_direct_route and recipe_of(run) is not None:
        for tell in on_direct_route:
            tell(entry)
    return route, run


def find_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe | None:
    """The recipe of a call that `dispatch` has run; None where its run is not cached, or is more than an op on the blocks."""
    entry = _entry_of(current_settings().routes, func)[0]
    try:
        return recipe_of(entry.runs.get(call_key(entry, args, kwargs)))
    except TypeError:  # an argument that cannot be hashed
        return None


def find_route(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
    """The route of a call, from the same cache as `dispatch`; for a dry run, whose tensors have a spec only."""
    if is_symbolic(args, kwargs):
        return _find_symbolic(func, *symbolic_arguments(args, kwargs))[0]
    entry = _entry_of(current_settings().routes, func)[0]
    key = call_key(entry, args, kwargs)
    try:
        known = entry.routes.get(key)
    except TypeError:
        return decide(OpCall(func, args, kwargs), find_route)[0]
    return known or _choose(entry, key, args, kwargs)[0]
