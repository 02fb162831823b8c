"""Ops as functions of other ops: torch's decompositions, and functional variants of ops that write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import tensors_in
from shardwise.call.schema import op_info
from shardwise.layout.sizes import same_sizes
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import decomposition_of
from shardwise.torch_internals.subclass import bump_versions

__all__ = ["program_for", "writing_variant"]

# Ops whose decomposition rounds differently from the kernel: it computes in float64 or float32, where the kernel rounds the
# bounds to the result's dtype and computes in that.
_ROUNDED_DIFFERENTLY = {"aten::linspace", "aten::logspace"}
_EXCLUDED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.inplace_view}


@lru_cache(maxsize=4096)
def program_for(func: Any) -> Callable[..., Any] | None:
    """A function of other ops that gives the same results as an op, or None if there is none."""
    info = op_info(func)
    if _EXCLUDED & info.tags or info.is_view:
        return None
    if info.writes:
        targets = [a for a in info.arguments if a.writes]
        only_first = [a.name for a in targets] == [info.arguments[0].name]
        if info.functional is None or not (only_first or all(a.is_out for a in targets)):
            return None
        return writing_variant(func, info.functional)
    if any(a.alias for a in info.arguments) or info.qualified_name in _ROUNDED_DIFFERENTLY:
        return None
    return decomposition_of(func)


def writing_variant(func: Any, functional: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place or out variant: compute the results with `functional` and copy them into the targets' own layouts."""
    info = op_info(func)
    targets = [a.name for a in info.arguments if a.writes]

    def run(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip((a.name for a in info.arguments), args, strict=False)) | kwargs
        given = [named[name] for name in targets]
        into: list[Tensor] = tensors_in(given)
        if any(isinstance(t, list | tuple) for t in given):
            bump_versions(into)  # autograd does it for single tensors
        results = functional(*args, **{k: v for k, v in kwargs.items() if k not in info.out_names})
        for t, r in zip(into, [results] if isinstance(results, Tensor) else list(results), strict=True):
            target = t if same_sizes(t.shape, r.shape) else _resized(t, r.shape)
            if info.qualified_name in _FILLS:
                target, r = _once(target, r)
            target.copy_(r)
        if not info.returns:
            return None
        return into[0] if len(into) == 1 else tuple(into)

    return run


_FILLS = frozenset({"aten::fill_", "aten::zero_"})
"""Ops that may write to an expanded tensor, since all elements get the same value."""


def _once(target: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """An expanded target and its value without the repeated elements, unless its blocks repeat none."""
    if isinstance(target, DTensor) and target._source is not None and target._source.kind == "moved":
        return target, value
    for d, (step, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if step == 0 and size > 1:
            target, value = target.narrow(d, 0, 1), value.narrow(d, 0, 1)
    return target, value


def _resized(t: Tensor, shape: torch.Size) -> Tensor:
    """A target in the shape of its result; as in torch, with a warning if it had elements."""
    if t.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(t.shape)}, which does not "
            f"match the required output shape {list(shape)}. Pass an empty tensor, or one of that shape.",
            stacklevel=2,
        )
    return torch.Tensor.resize_(
        t, shape
    )  # not the method of DTensor, which takes the op's own reference for a view
