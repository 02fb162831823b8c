"""A rehearsal: what a program of ops would send, told from specs alone, with no blocks and on no rank in particular."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import seconds_of
from shardwise.alternatives.registry import offered
from shardwise.call.fallback import plans_to_whole, returned_by
from shardwise.call.meta import made_by
from shardwise.call.resolve import prepare, tensors_in
from shardwise.call.variants import is_composite, program_for
from shardwise.layout import Layout, Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import implicit_replication

__all__ = ["cheaper_program", "rehearsed"]

_DEEPEST = 8  # programs within programs


def rehearsed(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The seconds that a program's communication takes, or None where it needs values to go on."""
    played = _played(program, args, kwargs)
    return None if played is None else played[0]


def _played(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, Any] | None:
    """The seconds, and what the program makes, as actors."""
    _seconds.append(0.0)
    try:
        with implicit_replication(), torch.no_grad():
            result = program(*_as_actors(args), **_as_actors(kwargs))
        # a program that makes a plain tensor has lost the mesh, as `new_zeros` by way of `zeros`
        return (_seconds[-1], result) if all(isinstance(t, _Actor) for t in tensors_in([result])) else None
    except Exception:  # a program that needs values, or refuses the call: the op itself will say why
        return None
    finally:
        _seconds.pop()


_seconds: list[float] = []


def cheaper_program(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """An op without a row as a program of others, if that sends less than gathering its inputs."""
    program = program_for(func)
    whole = seconds_of(plans_to_whole(tensors_in([*args, *kwargs.values()])))
    # what the op itself refuses, or says with a result of another shape, it must say on the whole
    if program is None or whole == 0.0 or made_by(func, args, kwargs) is None:
        return None
    seconds = rehearsed(program, args, kwargs)
    if seconds is None or seconds >= whole:
        return None

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with implicit_replication():  # what the program makes itself is the same everywhere
            return program(*args, **kwargs)

    return run


class _Actor(DTensor):
    """A tensor of which there is only the spec; ops on it note what they would send."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _play(func, args, kwargs or {})


def _play(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recipe = prepare(func, args, kwargs)
    if recipe is None and is_composite(func):
        return func.decompose(*args, **kwargs)
    here = seconds_of(
        plans_to_whole(tensors_in([*args, *kwargs.values()])) if recipe is None else recipe.moves
    )
    offer = offered(func, recipe, args, kwargs) if here else None
    made = None
    if recipe is None and offer is None and len(_seconds) < _DEEPEST:
        program = program_for(func)
        inside = None if program is None else _played(program, args, kwargs)
        if inside is not None and inside[0] < here:
            here, made = inside
    specs = None if recipe is None else recipe.outputs
    if offer is not None and offer.seconds < here:
        here, specs = offer.seconds, offer.outputs or specs
    _seconds[-1] += here
    if (target := returned_by(func, args, kwargs)) is not None or not func._schema.returns:
        return target
    results = made_by(func, args, kwargs)
    if results is None:
        raise NotImplementedError(f"{func} cannot be rehearsed: what it makes depends on values")
    # a program's results lie as it leaves them, pending parts and all
    return _cast(func, results, specs, args, kwargs) if made is None else made


def _cast(
    func: Any,
    results: list[Any],
    specs: tuple[Spec, ...] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What an op made as actors: as its row lays it out, else whole."""
    first = next(t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, DTensor))
    axes, rest = first._spec.layout.axes, iter(specs or ())
    out: list[Any] = []
    for t in results:
        if not isinstance(t, Tensor):  # None where a mask leaves an output out, or a number
            out.append(t)
            continue
        whole = Layout.replicated(tuple(t.shape), axes)
        out.append(
            _actor(
                Spec(first.device_mesh, whole, t.dtype, t.shape, tuple(t.stride()))
                if specs is None
                else next(rest)
            )
        )
    alone = len(func._schema.returns) == 1 and str(func._schema.returns[0].type) == "Tensor"
    return out[0] if alone else out


def _actor(spec: Spec) -> _Actor:
    return _Actor(torch.empty(0, dtype=spec.dtype, device="meta"), spec)


def _as_actors(value: Any) -> Any:
    if isinstance(value, DTensor):
        return _actor(value._spec)
    if isinstance(value, list | tuple):
        return type(value)(_as_actors(v) for v in value)
    if isinstance(value, dict):
        return {k: _as_actors(v) for k, v in value.items()}
    return value
