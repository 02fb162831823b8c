"""The `grad` of a DTensor, which notes that the program has it: from then on it may have views of it, or keep it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientMethods", "gradient_of", "is_known_gradient", "set_gradient"]

_KNOWN = "_shardwise_known"
_grad: Any = torch.Tensor.grad


def gradient_of(x: Tensor) -> Tensor | None:
    """The gradient of a tensor, for code that does not give it to the program."""
    return _grad.__get__(x)  # type: ignore[no-any-return]


def set_gradient(x: Tensor, grad: Tensor | None) -> None:
    """Set the gradient of a tensor to one that the program does not have."""
    _grad.__set__(x, grad)


def is_known_gradient(grad: Tensor) -> bool:
    """Whether the program has read this gradient, or has set it."""
    return _KNOWN in grad.__dict__


class GradientMethods:
    """The attribute `grad`."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        """The gradient; None before the first backward pass."""
        grad: Tensor | None = _grad.__get__(self)
        if grad is not None:
            grad.__dict__[_KNOWN] = True
        return grad

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        _grad.__set__(self, new)
        if new is not None:
            new.__dict__[_KNOWN] = True

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)
