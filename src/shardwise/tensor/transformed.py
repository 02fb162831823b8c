"""Dropout inside torch.func's transforms: there torch draws for a plain tensor, which is no DTensor's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from shardwise.tensor.dtensor import DTensor

__all__ = ["draw_in_transforms"]

aten = torch.ops.aten

_KEY = "FuncTorchDynamicLayerFrontMode"  # where a call enters the transforms that are on
_library = torch.library.Library("aten", "IMPL")


def _is_distributed(x: Any) -> bool:
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return isinstance(x, DTensor)


def _noise(x: Tensor, p: float, features: bool) -> Tensor:
    """Ones that stay and zeros that go: of each element, or of each channel of each sample."""
    if features:
        for dim in range(2, x.dim()):
            x = x.narrow(dim, 0, 1)
    return torch.bernoulli(torch.empty_like(x), 1 - p)


def _dropped(x: Tensor, p: float, features: bool, alpha: bool) -> Tensor:
    noise = _noise(x, p, features)
    if not alpha:
        return x * noise.div(1 - p)
    alpha_ = 1.7580993408473766
    a = 1 / math.sqrt((alpha_ * alpha_ * p + 1) * (1 - p))
    return x * (noise * a) + noise.add(-1).mul(alpha_ * a).add(alpha_ * a * p)


def _dropping(features: bool, alpha: bool, in_place: bool) -> Callable[[Tensor, float, bool], Tensor]:
    def run(x: Tensor, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if features and x.dim() < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        if p == 0 or not train or x.numel() == 0:
            return x
        made = x * 0 if p == 1 else _dropped(x, p, features, alpha)
        return x.copy_(made) if in_place else made

    return run


@cache  # once, however often it is imported
def draw_in_transforms() -> None:
    """Have DTensors draw from the stream there, and plain tensors as torch has it."""
    for features in (False, True):
        for alpha in (False, True):
            for in_place in (False, True):
                name = "feature_" * features + "alpha_" * alpha + "dropout" + "_" * in_place
                _put(name, _dropping(features, alpha, in_place))


def _put(name: str, run: Callable[[Tensor, float, bool], Tensor]) -> None:
    torchs = torch.library.get_kernel(f"aten::{name}", _KEY)

    def kernel(keys: Any, x: Tensor, p: float, train: bool) -> Any:
        if _is_distributed(x):
            return run(x, p, train)
        return torchs.call_boxed(keys, x, p, train)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        _library.impl(name, kernel, _KEY, with_keyset=True, allow_override=True)
