"""The gradients of parameters: moved to the parameter's layout when they are read, plain for plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from shardwise.layout import Layout, largest_block
from shardwise.layout.sizes import cached, same_sizes
from shardwise.ops.pending_gradients import is_watched, wait_in_layout, watch
from shardwise.parallel.plain import to_plain
from shardwise.plan import plan_redistribute
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.gradient_methods import gradient_of
from shardwise.torch_internals.autograd import accumulating_leaf, has_accumulation_hooks, restore_hooks
from shardwise.torch_internals.graph_calls import call_in_graph, call_while_tracing

__all__ = ["watch_gradient", "watch_gradients"]

_LARGE = 1 << 20
"""A gradient of so many bytes is reduced where one in the parameter's layout is there already: it would be held twice."""


@call_while_tracing
def watch_gradients(module: nn.Module) -> None:
    """Watch the gradients of all parameters of a module that require one and are not watched yet.

    This is done before each forward pass: parameters may have been added, unfrozen, copied or given memory since the last.
    """
    for p in module.parameters():
        if p.requires_grad and not is_watched(p):
            watch_gradient(p)


def watch_gradient(p: Tensor) -> None:
    """Watch the gradient of a parameter; a plain one's is plain.

    A gradient that is accumulated stays in the layout in which the backward pass computed it, and is moved to that of the
    parameter with all others before the optimizer's step or clipping (see `ops/pending_gradients.py`). One that is returned, that a
    hook reads, or that has a graph of its own is moved at once.
    """
    watch(p)
    hook = _reduce(p.sharding) if isinstance(p, DTensor) else _plain_gradient
    if hook not in restore_hooks(p):
        p.register_hook(hook)


@lru_cache(maxsize=4096)
def _reduce(layout: Layout) -> Callable[[Tensor], Tensor]:
    """A hook that redistributes a gradient to a layout, or leaves it as it is until it is read.

    One function per layout: hooks are compared, and compilers trace functions rather than objects.
    """
    return lambda grad: _settle(grad, layout)


@call_in_graph
def _settle(grad: Tensor, layout: Layout) -> Tensor:
    if not isinstance(grad, DTensor) or grad.sharding is layout or grad.is_sparse:
        return grad
    if not same_sizes(grad.shape, layout.shape):
        return grad
    return grad if _may_wait(grad, layout) else grad.redistribute(placements=layout.placements)


def _may_wait(grad: DTensor, target: Layout) -> bool:
    """Whether a gradient may be accumulated as it is, to be moved to its parameter's layout when someone reads it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    p = accumulating_leaf()
    if p is None or has_accumulation_hooks(p):  # someone reads the gradient at once
        return False
    before, here = gradient_of(p), grad.sharding
    if not _is_worth_waiting(here, target):
        return False
    if before is None:
        return True
    if not isinstance(before, DTensor) or before.dtype is not grad.dtype or before.is_sparse:
        return False
    if before.sharding is here:
        return True
    nbytes = grad.numel() * grad.dtype.itemsize
    pending = here.with_partial({}) is target and all(op == "sum" for _, op in here.partial)
    if before.sharding is not target or not pending or nbytes >= _LARGE:
        return False
    # pending as well, so that the gradients are added without communication
    wait_in_layout(p, before, here)
    return True


@cached(4096)
def _is_worth_waiting(here: Layout, target: Layout) -> bool:
    """Whether a gradient takes no more memory as it is than in its parameter's layout, and moving it there sends something."""
    return largest_block(here) <= largest_block(target) and plan_redistribute(here, target).bytes > 0


def _plain_gradient(grad: Tensor) -> Tensor:
    """The gradient of a plain parameter, which counts as replicated, so that autograd hands it a DTensor."""
    return to_plain(grad)
