"""Dropout whose noise torch's C++ code would draw into a plain tensor, or inside a kernel: on DTensors it is a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.layout import Layout
from shardwise.tensor.construct import from_function, memory_like
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.patches import KernelPatch, TransformPatch, beneath_patches, unwrap_transforms

__all__ = ["attention_with_dropout", "dropout_patches", "uses_dropout"]

aten = torch.ops.aten
_SELU_LIMIT = 1.7580993408473766  # minus the limit of SELU for large negative inputs


def _dropout_by(noise: Callable[[Any, float], Tensor], alpha: bool, in_place: bool) -> Callable[..., Tensor]:
    """Dropout by a noise tensor of ones and zeros that is broadcast to the input.

    Alpha dropout replaces dropped elements so that the mean and variance of SELU's outputs are kept.
    """

    def run(x: Any, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0 or not train or x.numel() == 0:
            return x  # type: ignore[no-any-return]
        result = x * 0 if p == 1 else _apply(x, noise(x, p), p, alpha)
        return x.copy_(result) if in_place else result

    return run


def _apply(x: Tensor, noise: Tensor, p: float, alpha: bool) -> Tensor:
    if not alpha:
        return x * noise.div(1 - p)
    a = 1 / math.sqrt((_SELU_LIMIT * _SELU_LIMIT * p + 1) * (1 - p))
    return x * (noise * a) + noise.add(-1).mul(_SELU_LIMIT * a).add(_SELU_LIMIT * a * p)


def _check_features(x: Tensor) -> None:
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")


def _feature_noise(x: DTensor, p: float) -> Tensor:
    """One number for each channel of each sample, in the tensor's layout along these two dims."""
    _check_features(x)
    layout = x._spec.layout
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    ones = Layout.replicated(shape, layout.axes).dims[2:]
    target = Layout(layout.axes, (*layout.dims[:2], *ones))
    noise = from_function(
        target, lambda size, *_: torch.empty(size, dtype=x.dtype), x.dtype, False, x.device_mesh
    )
    return noise.bernoulli_(1 - p)


def _element_noise_in_transform(x: Tensor, p: float) -> Tensor:
    return torch.bernoulli(memory_like(x), 1 - p)


def _feature_noise_in_transform(x: Tensor, p: float) -> Tensor:
    _check_features(x)
    for dim in range(2, x.dim()):
        x = x.narrow(dim, 0, 1)
    return _element_noise_in_transform(x, p)


def attention_with_dropout(*args: Any, **kwargs: Any) -> Any:
    """Attention as its mathematical program.

    The kernels draw dropout by an element's position in the block. torch still handles boolean masks, autocast and errors.
    """
    with sdpa_kernel(SDPBackend.MATH), beneath_patches():
        return aten.scaled_dot_product_attention.default(*args, **kwargs)


def uses_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of attention drops anything."""
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _is_dtensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(unwrap_transforms(args[0]), DTensor)


def dropout_patches() -> list[KernelPatch | TransformPatch]:
    """The patches of dropout, for tensors and inside torch.func transforms."""
    patches: list[KernelPatch | TransformPatch] = []
    reason = "torch draws its noise into a plain tensor, from its own generator"
    for alpha in (False, True):
        for in_place in (False, True):
            name = "alpha_" * alpha + "dropout" + "_" * in_place
            feature, element = getattr(aten, "feature_" + name).default, getattr(aten, name).default
            runs = [
                _dropout_by(noise, alpha, in_place)
                for noise in (_feature_noise, _feature_noise_in_transform, _element_noise_in_transform)
            ]
            patches += [
                KernelPatch(feature, runs[0], reason, _is_dtensor),
                TransformPatch(feature, runs[1], reason, _is_dtensor),
                TransformPatch(element, runs[2], reason, _is_dtensor),
            ]
    return patches
