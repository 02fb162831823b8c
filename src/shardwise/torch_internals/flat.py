"""Many tensors as one flat tensor, and a flat tensor as many: torch's own loops in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["flattened", "parts_of", "shape_models"]

_flatten: Any = torch._C._nn.flatten_dense_tensors
_unflatten: Any = torch._C._nn.unflatten_dense_tensors
_below_views: Any = torch._C._AutoDispatchBelowADInplaceOrView


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors of one dtype one after the other, in new memory.

    >>> flattened([torch.zeros(1, 2), torch.ones(1)])
    tensor([0., 0., 1.])
    """
    return _flatten(tensors) if len(tensors) > 1 else tensors[0].resolve_neg().reshape(-1).clone()  # type: ignore[no-any-return]


def shape_models(shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """What `parts_of` takes for shapes; nothing if one of them has no elements, which torch gives another shape."""
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
