"""Dropout that torch's C++ code would draw for a plain tensor, or in a kernel: on DTensors it is made of other ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.api.factories import made_on
from shardwise.layout import Layout
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.override import beneath, instead_of

__all__ = ["check_features", "draw_noise_for_dtensors", "dropping"]

aten = torch.ops.aten


def dropping(noise: Callable[[Any, float], Tensor], alpha: bool, in_place: bool) -> Callable[..., Tensor]:
    """Dropout by noise: ones for what stays and zeros for what goes, in a shape that is broadcast.

    Of `alpha` dropout, what goes becomes what keeps mean and variance of what SELU makes.
    """

    def run(x: Any, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0 or not train or x.numel() == 0:
            return x  # type: ignore[no-any-return]
        made = x * 0 if p == 1 else _dropped(x, noise(x, p), p, alpha)
        return x.copy_(made) if in_place else made

    return run


def _dropped(x: Tensor, noise: Tensor, p: float, alpha: bool) -> Tensor:
    if not alpha:
        return x * noise.div(1 - p)
    lowest = 1.7580993408473766  # what SELU tends to, negated
    a = 1 / math.sqrt((lowest * lowest * p + 1) * (1 - p))
    return x * (noise * a) + noise.add(-1).mul(lowest * a).add(lowest * a * p)


def check_features(x: Tensor) -> None:
    """Raise if there are no channels."""
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")


def _of_features(x: DTensor, p: float) -> Tensor:
    """One number for each channel of each sample: as the tensor lies along these two dims."""
    check_features(x)
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    ones = Layout.replicated(shape, x.layout.axes).dims[2:]
    layout = Layout(x.layout.axes, (*x.layout.dims[:2], *ones))
    new = made_on(layout, lambda size, *_: torch.empty(size, dtype=x.dtype), x.dtype, False, x.device_mesh)
    return new.bernoulli_(1 - p)


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
    for alpha in (False, True):
        for in_place in (False, True):
            name = "feature_" + "alpha_" * alpha + "dropout" + "_" * in_place
            instead_of(getattr(aten, name).default, dropping(_of_features, alpha, in_place))
    instead_of(aten.scaled_dot_product_attention.default, _attention, _drops)
