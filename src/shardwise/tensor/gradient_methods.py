"""The `grad` of a DTensor, which notes that the program has it: from then on it may have views of it, or keep it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "GradientMethods",
    "forget_readers",
    "gradient_of",
    "is_known_gradient",
    "set_gradient",
    "unknown_gradients",
]

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


def unknown_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters that the program does not have."""
    grads = [gradient_of(p) for p in params]
    return [g for g in grads if g is not None and not is_known_gradient(g)]


def forget_readers(grads: Iterable[Tensor]) -> None:
    """Take the program not to have some gradients, which only functions of torch have read."""
    for grad in grads:
        grad.__dict__.pop(_KNOWN, None)


class GradientMethods:
    """The attribute `grad`."""

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
