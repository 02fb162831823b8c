"""Dropout inside torch.func's transforms: there torch draws for a plain tensor, which is no DTensor's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from shardwise.ops.dropout import check_features, dropping
from shardwise.tensor.dtensor import DTensor

__all__ = ["draw_in_transforms"]

aten = torch.ops.aten

_KEY = "FuncTorchDynamicLayerFrontMode"  # where a call enters the transforms that are on
_library = torch.library.Library("aten", "IMPL")


def _is_distributed(x: Any) -> bool:
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return isinstance(x, DTensor)


def _of_elements(x: Tensor, p: float) -> Tensor:
    return torch.bernoulli(torch.empty_like(x), 1 - p)


def _of_features(x: Tensor, p: float) -> Tensor:
    check_features(x)
    for dim in range(2, x.dim()):
        x = x.narrow(dim, 0, 1)
    return _of_elements(x, p)


@cache  # once, however often it is imported
def draw_in_transforms() -> None:
    """Have DTensors draw from the stream there, and plain tensors as torch has it."""
    for features in (False, True):
        for alpha in (False, True):
            for in_place in (False, True):
                name = "feature_" * features + "alpha_" * alpha + "dropout" + "_" * in_place
                _put(name, dropping(_of_features if features else _of_elements, alpha, in_place))


def _put(name: str, run: Callable[[Tensor, float, bool], Tensor]) -> None:
    torchs = torch.library.get_kernel(f"aten::{name}", _KEY)

    def kernel(keys: Any, x: Tensor, p: float, train: bool) -> Any:
        if _is_distributed(x):
            return run(x, p, train)
        return torchs.call_boxed(keys, x, p, train)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        _library.impl(name, kernel, _KEY, with_keyset=True, allow_override=True)
