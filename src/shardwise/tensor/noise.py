"""Dropout that torch's C++ code would draw for a plain tensor, or in a kernel: on DTensors it is made of other ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.layout import Layout
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.factories import made_on
from shardwise.tensor.instead import beneath, instead_of

__all__ = ["draw_noise_for_dtensors"]

aten = torch.ops.aten


def _noise(x: DTensor, p: float) -> Tensor:
    """What each channel of each sample is multiplied with, before scaling: as the tensor lies along these two dims."""
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    ones = Layout.replicated(shape, x.layout.axes).dims[2:]
    layout = Layout(x.layout.axes, (*x.layout.dims[:2], *ones))
    new = made_on(layout, lambda size, *_: torch.empty(size, dtype=x.dtype), x.dtype, False, x.device_mesh)
    return new.bernoulli_(1 - p)


def _check(p: float) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")


def _feature_dropout(x: DTensor, p: float) -> Tensor:
    return x * _noise(x, p).div_(1 - p)


def _feature_alpha_dropout(x: DTensor, p: float) -> Tensor:
    """Dropped features become what keeps mean and variance of what SELU makes."""
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    noise = _noise(x, p)
    shift = noise.add(-1).mul_(alpha * a).add_(alpha * a * p)
    return x * noise.mul_(a) + shift


def _dropping(make: Callable[[DTensor, float], Tensor]) -> Callable[[DTensor, float, bool], Tensor]:
    def run(x: DTensor, p: float, train: bool) -> Tensor:
        _check(p)
        if p == 0 or not train or x.numel() == 0:
            return x
        if p == 1:
            return x * torch.zeros((), dtype=x.dtype, device=x.device)
        return make(x, p)

    return run


def _dropping_in_place(make: Callable[[DTensor, float], Tensor]) -> Callable[[DTensor, float, bool], Tensor]:
    dropped = _dropping(make)

    def run(x: DTensor, p: float, train: bool) -> Tensor:
        made = dropped(x, p, train)
        return x if made is x else x.copy_(made)

    return run


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Kernels for attention draw by where an element lies in the block; written out, dropout is drawn as everywhere.

    What torch does before it chooses a kernel it does here too: masks of bools, autocast, errors.
    """
    with sdpa_kernel(SDPBackend.MATH), beneath():
        return aten.scaled_dot_product_attention.default(*args, **kwargs)


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def draw_noise_for_dtensors() -> None:
    """Put these ways before torch's, for DTensors."""
    instead_of(aten.feature_dropout.default, _dropping(_feature_dropout))
    instead_of(aten.feature_dropout_.default, _dropping_in_place(_feature_dropout))
    instead_of(aten.feature_alpha_dropout.default, _dropping(_feature_alpha_dropout))
    instead_of(aten.feature_alpha_dropout_.default, _dropping_in_place(_feature_alpha_dropout))
    instead_of(aten.scaled_dot_product_attention.default, _attention, _drops)
