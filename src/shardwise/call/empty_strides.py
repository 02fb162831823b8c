"""Strides of the results of ops on tensors without elements.

Kernels often return early for them, with other strides than torch's meta kernels give. As there are no values, the kernel itself
can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.call.schema import op_info

__all__ = ["may_differ_when_empty", "strides_of_kernel"]

_EXCLUDED = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view})


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def may_differ_when_empty(func: Any, values: Sequence[Any], device_type: Callable[[Tensor], str]) -> bool:
    """Whether all tensors of a call are on the CPU and without elements, and the result may have other strides than contiguous ones."""
    tensors = list(_tensors(values))
    if (
        not tensors
        or device_type(tensors[0]) != "cpu"
        or not all(type(n) is int for t in tensors for n in t.shape)
    ):
        return False
    if any(0 not in t.shape for t in tensors) or _EXCLUDED & op_info(func).tags:
        return False
    return not all(t.is_contiguous() and t.stride() == torch.empty(t.shape).stride() for t in tensors)


def strides_of_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The inferred result of such a call on the CPU, with the strides that the kernel gives it."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    real = func(*map_leaves(leaf, args), **map_leaves(leaf, kwargs))
    if isinstance(result, Tensor):
        return _restrided(result, real)
    if not isinstance(result, list | tuple):
        return result
    return [_restrided(a, b) for a, b in zip(result, real, strict=True)]


def _restrided(inferred: Any, real: Any) -> Any:
    if not isinstance(inferred, Tensor) or not isinstance(real, Tensor) or inferred.shape != real.shape:
        return inferred
    return inferred.new_empty_strided(inferred.shape, real.stride())
