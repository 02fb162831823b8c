"""The gradients of parameters: reduced to the parameter's layout before they are accumulated, plain for plain parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.layout import Layout
from shardwise.parallel.plain import to_plain
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import restore_hooks

__all__ = ["watch_gradient", "watch_gradients"]

_WATCHED = "_shardwise_watched"


def watch_gradients(module: nn.Module) -> None:
    """Watch the gradients of all parameters of a module that require one and are not watched yet.

    This is done before each forward pass: parameters may have been added, unfrozen, copied or given memory since the last.
    """
    for p in module.parameters():
        if p.requires_grad and getattr(p, _WATCHED, None) != id(p):
            watch_gradient(p)


def watch_gradient(p: Tensor) -> None:
    """Bring the gradient of a parameter into the parameter's layout before it is accumulated; a plain one's is plain.

    Without this a gradient may stay pending where ranks hold terms of a sum. That is right as well, and optimizers accept it,
    because the layout of the gradient says what has been reduced; but each reader would reduce it anew.
    """
    # the id, because a copy has the attributes of the original and none of its hooks
    setattr(p, _WATCHED, id(p))
    hook = _Reduce(p.sharding) if isinstance(p, DTensor) else _plain_gradient
    if hook not in restore_hooks(p):
        p.register_hook(hook)


@dataclass(frozen=True)
class _Reduce:
    """Redistributes a gradient to a layout."""

    layout: Layout

    def __call__(self, grad: Tensor) -> Tensor:
        target = self.layout
        if not isinstance(grad, DTensor) or grad.sharding is target or grad.is_sparse:
            return grad
        if grad.shape != torch.Size(target.shape):
            return grad
        return grad.redistribute(placements=target.placements)


def _plain_gradient(grad: Tensor) -> Tensor:
    """The gradient of a plain parameter, which counts as replicated, so that autograd hands it a DTensor."""
    return to_plain(grad)
