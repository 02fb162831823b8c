"""Which dim of a module's tensor is split for column and row parallelism."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

__all__ = ["Split", "feature_dim", "is_transposed_linear", "split_dim"]

Split = Literal["out", "in", "experts"]

_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def split_dim(module: nn.Module, tensor: Tensor, split: Split) -> int | None:
    """The dim of one of a module's tensors that holds its output features, input features or experts; None if none does.

    A tensor of a module that is not known has its input features last and its output features before them, as the
    weights of linear layers have, with any number of leading dims (experts).

    >>> split_dim(nn.Linear(4, 6), nn.Linear(4, 6).weight, "out"), split_dim(nn.Embedding(4, 6), nn.Embedding(4, 6).weight, "out")
    (0, 1)
    """
    ndim = tensor.dim()
    if ndim == 0:
        return None
    if split == "experts":
        return 0
    if ndim == 1:
        return 0 if split == "out" else None
    out_dim, in_dim = _feature_dims(module, ndim)
    return out_dim if split == "out" else in_dim


def _feature_dims(module: nn.Module, ndim: int) -> tuple[int, int]:
    """The dims of output and of input features of a weight."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1, 0
    if isinstance(module, _CONVOLUTIONS):
        return 0, 1
    if isinstance(module, _TRANSPOSED_CONVOLUTIONS):
        return 1, 0
    if is_transposed_linear(module) and ndim == 2:
        return 1, 0
    return ndim - 2, ndim - 1


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that keeps its weight as (in, out), such as GPT-2's Conv1D."""
    weight = getattr(module, "weight", None)
    features = getattr(module, "nf", None)
    return isinstance(features, int) and isinstance(weight, Tensor) and tuple(weight.shape[1:]) == (features,)


def feature_dim(module: nn.Module) -> int:
    """The dim of a module's activations that holds their features, counted from the back.

    >>> feature_dim(nn.Linear(1, 1)), feature_dim(nn.Conv2d(1, 1, 1))
    (-1, -3)
    """
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED_CONVOLUTIONS):
        return -1 - len(module.kernel_size)
    return -1
