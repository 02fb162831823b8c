"""The state of autograd: whether a backward pass runs, and forward-mode derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["has_tangent", "in_backward"]

_current_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    >>> seen = []
    >>> x = torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: seen.append(in_backward()))
    >>> (x * 2).sum().backward()
    >>> seen, in_backward()
    ([True], False)
    """
    return _current_task() != -1


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor carries a forward-mode derivative.

    >>> has_tangent(torch.ones(1))
    False
    """
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
