"""The gradients of parameters: reduced to the parameter's layout before they are accumulated, plain for plain parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.layout import Layout
from shardwise.parallel.plain import to_plain
from shardwise.tensor.dtensor import DTensor

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
    p.register_hook(_reduced_to(p.sharding) if isinstance(p, DTensor) else _plain_gradient)


def _reduced_to(layout: Layout) -> Callable[[Tensor], Tensor]:
    shape = torch.Size(layout.shape)

    def hook(grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor) or grad.sharding is layout or grad.is_sparse or grad.shape != shape:
            return grad
        return grad.redistribute(placements=layout.placements)

    return hook


def _plain_gradient(grad: Tensor) -> Tensor:
    """The gradient of a plain parameter, which counts as replicated, so that autograd hands it a DTensor."""
    return to_plain(grad)
