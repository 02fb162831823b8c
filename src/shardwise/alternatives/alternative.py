"""Alternative: a way to run a call other than its rule, with what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.layout import Spec
from shardwise.plan import Plan
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import to_layout

__all__ = ["Alternative", "Propose", "in_float32", "reduce_pending"]


class Alternative(NamedTuple):
    """A way to run a call.

    Attributes:
        run: a function of the call's arguments.
        plans: everything it sends; None for a program of other ops on DTensors, where a dry run finds out.
        outputs: the specs of its tensor results; None for a program, where the dry run finds out.
    """

    run: Callable[..., Any]
    plans: tuple[Plan, ...] | None = None
    outputs: tuple[Spec, ...] | None = None


Propose = Callable[[OpCall, Any], Alternative | None]
"""Propose an alternative for a call, or None, given the `Resolution` of the call by its rule.

For the ops in `registry.WITHOUT_RULE`, the resolution is None if no rule covers the call; other ops are not asked then. It may read specs, shapes and numbers, but neither values nor the coordinate of this rank: all ranks must
propose the same.
"""


def reduce_pending(func: Any, x: Tensor) -> Tensor:
    """A tensor without pending reductions: an intermediate result that is used twice is reduced once."""
    if not isinstance(x, DTensor) or not x._spec.layout.partial:
        return x
    return to_layout(func, x, x._spec.layout.with_partial({}))


_NARROW = (torch.float16, torch.bfloat16)


def in_float32(run: Callable[..., Any], resolution: Resolution) -> Callable[..., Any]:
    """A program that computes in float32 where tensors are narrower, and returns the op's dtypes."""

    def widen(value: Any) -> Any:
        return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in _NARROW else value

    def program(*args: Any, **kwargs: Any) -> Any:
        result = run(*map(widen, args), **{k: widen(v) for k, v in kwargs.items()})
        dtypes = iter([spec.dtype for spec in resolution.outputs])
        if isinstance(result, Tensor):
            return result.to(next(dtypes))
        return tuple(None if r is None else r.to(next(dtypes)) for r in result)

    return program
