"""Dry runs: what a program of ops would send and return, found on tensors that have a spec but no data.

A dry run does not depend on the rank, so all ranks come to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_tensors, tensors_in
from shardwise.call.meta import REFUSALS
from shardwise.call.op_call import OpCall
from shardwise.call.route import Route
from shardwise.call.schema import op_info
from shardwise.layout import Spec
from shardwise.plan import Plan
from shardwise.plan.settings import override_settings
from shardwise.tensor.abstract_tensor import abstract, recording
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor

__all__ = ["FindRoute", "cacheable", "dry_run"]

FindRoute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Route]

_MAX_DEPTH = 8  # programs within programs


class _NeedsValuesError(RuntimeError):
    """A program needs the values of a tensor without data."""


class _Recording:
    """The plans of a dry run so far, and how its ops find their routes."""

    def __init__(self, find_route: FindRoute, depth: int) -> None:
        self.find_route, self.depth = find_route, depth
        self.plans: list[Plan] = []

    def evaluate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of one op, after recording its plans."""
        route = self.find_route(func, args, kwargs)
        if route.kind == "composite":
            return func.decompose(*args, **kwargs)
        if route.plans is None:
            raise _NeedsValuesError(f"{func} runs as a {route.kind} op")
        self.plans += route.plans
        info = op_info(func)
        if (target := info.returned_argument(args, kwargs)) is not None or not info.returns:
            return target
        if route.outputs is None:
            raise _NeedsValuesError(f"the results of {func} depend on values")
        first = next(t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, DTensor))
        results = [
            abstract(o, is_simulated_tensor(first)) if isinstance(o, Spec) else o for o in route.outputs
        ]
        return results[0] if info.returns_tensor else results


_truncated: ContextVar[list[bool] | None] = ContextVar("truncated", default=None)


def dry_run(
    program: Callable[..., Any], call: OpCall, find_route: FindRoute
) -> tuple[tuple[Plan, ...], tuple[Spec, ...]] | None:
    """All that a program sends for the arguments of a call, and the specs of its tensor results.

    None if that depends on values, or if the program returns a plain tensor.
    """
    outer = recording.get()
    depth = outer.depth + 1 if isinstance(outer, _Recording) else 0
    if depth >= _MAX_DEPTH:
        if (truncated := _truncated.get()) is not None:
            truncated[0] = True
        return None
    this = _Recording(find_route, depth)
    token = recording.set(this)
    simulated = call.simulated
    try:
        with override_settings(plain="replicate"), torch.no_grad():
            args = map_tensors(lambda t: _abstract_like(t, simulated), call.args)
            kwargs = map_tensors(lambda t: _abstract_like(t, simulated), call.kwargs)
            result = program(*args, **kwargs)
    except REFUSALS:  # the program needs values or does not handle the call: the op itself then runs
        return None
    finally:
        recording.reset(token)
    results = tensors_in([result])
    if not all(isinstance(t, DTensor) for t in results):
        return None
    return tuple(this.plans), tuple(t._spec for t in results if isinstance(t, DTensor))


@contextmanager
def cacheable() -> Iterator[Callable[[], bool]]:
    """Find out whether a route that is chosen inside the block is final.

    It is not if a dry run inside was refused because it was nested too deeply: a call that is not nested may do better.
    """
    outer, truncated = _truncated.get(), [False]
    token = _truncated.set(truncated)
    try:
        yield lambda: not truncated[0]
    finally:
        _truncated.reset(token)
        if outer is not None and truncated[0]:
            outer[0] = True


def _abstract_like(t: Tensor, simulated: bool) -> Tensor:
    return abstract(t._spec, simulated) if isinstance(t, DTensor) else t
