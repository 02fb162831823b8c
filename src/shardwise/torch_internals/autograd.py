"""The state of autograd: whether a backward pass runs, forward-mode derivatives, and hooks that a tensor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["has_tangent", "in_backward", "restore_hooks"]

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


def restore_hooks(x: Tensor) -> list[Callable[..., Any]]:
    """Connect the gradient hooks of a tensor again, and return them.

    `torch.utils.swap_tensors`, with which `to_empty()`, `to()` and the like replace the parameters of a module, leaves hooks on
    the Python object but not in the new tensor's part of the graph, where autograd looks for them.

    >>> x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> _ = x.register_hook(lambda grad: grad * 5)
    >>> torch.utils.swap_tensors(x, y)
    >>> len(restore_hooks(x))
    1
    >>> x.backward()
    >>> x.grad
    tensor([5.])
    """
    hooks = x._backward_hooks
    if hooks is None:
        return []
    x._backward_hooks = hooks
    return list(hooks.values())
