"""Many tensors as one flat tensor, and a flat tensor as many: torch's own loops in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_internals.recording import without_modes

__all__ = ["flattened", "parts_of", "shape_models"]

_flatten: Any = torch._C._nn.flatten_dense_tensors
_unflatten: Any = torch._C._nn.unflatten_dense_tensors
_below_views: Any = torch._C._AutoDispatchBelowADInplaceOrView


def flattened(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The elements of tensors of one dtype one after the other, in new memory; cast to a dtype if one is given.

    >>> flattened([torch.zeros(1, 2), torch.ones(1)])
    tensor([0., 0., 1.])
    >>> flattened([torch.ones(1), torch.ones(1)], torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    first = tensors[0]
    if dtype is not None and first.dtype is not dtype:
        out = first.new_empty(sum(t.numel() for t in tensors), dtype=dtype)
        return torch.cat([t.reshape(-1) for t in tensors], out=out)
    return _flatten(tensors) if len(tensors) > 1 else first.resolve_neg().reshape(-1).clone()


def shape_models(shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """What `parts_of` takes for shapes; nothing if one of them has no elements, which torch gives another shape."""
    with without_modes():  # they outlive a trace
        models = tuple(torch.empty(tuple(shape), device="meta") for shape in shapes)
    return models if all(m.numel() for m in models) else ()


def parts_of(buffer: Tensor, models: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in its memory, in the shapes of some models.

    Autograd does not know them for views: each counts the writes to itself only.

    >>> buffer = torch.zeros(3)
    >>> a, b = parts_of(buffer, shape_models([(1, 2), (1,)]))
    >>> a.add_(1)._version, b._version, buffer
    (1, 0, tensor([1., 1., 0.]))
    """
    with _below_views():
        return list(_unflatten(buffer, models))
