"""The `grad` of a DTensor, which notes that the program has it: from then on it may have views of it, or keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientMethods", "gradient_of", "is_known_gradient", "set_gradient"]

_KNOWN = "_shardwise_known"
_grad: Any = torch.Tensor.grad
_get = _grad.__get__


gradient_of: Callable[[Tensor], Tensor | None] = _get
"""The gradient of a tensor, for code that does not give it to the program."""


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
        grad: Tensor | None = _get(self)
        if grad is not None:
            grad._shardwise_known = True  # type: ignore[attr-defined]  # not by __dict__, which dynamo cannot trace
        return grad

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        _grad.__set__(self, new)
        if new is not None:
            new.__dict__[_KNOWN] = True

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)
