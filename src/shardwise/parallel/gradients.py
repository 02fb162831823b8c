"""The gradients of parameters: in the parameter's layout at the end of a backward pass, plain for plain parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardwise.layout import Layout
from shardwise.layout.sizes import same_sizes
from shardwise.parallel.plain import to_plain
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.torch_internals.autograd import (
    accumulating_leaf,
    at_backward_end,
    current_backward,
    has_accumulation_hooks,
    restore_hooks,
)
from shardwise.torch_internals.graph_calls import call_in_graph, call_while_tracing

__all__ = ["watch_gradient", "watch_gradients"]

_WATCHED = "_shardwise_watched"
_LARGE = 1 << 20
"""Gradients of so many bytes per rank are reduced alone: the latency of a collective no longer matters."""
_MOST = 1 << 24
"""So many bytes per rank are reduced together at most, since a buffer holds all of them."""


@call_while_tracing
def watch_gradients(module: nn.Module) -> None:
    """Watch the gradients of all parameters of a module that require one and are not watched yet.

    This is done before each forward pass: parameters may have been added, unfrozen, copied or given memory since the last.
    """
    for p in module.parameters():
        if p.requires_grad and getattr(p, _WATCHED, None) != id(p):
            watch_gradient(p)


def watch_gradient(p: Tensor) -> None:
    """Bring the gradient of a parameter into the parameter's layout; a plain one's is plain.

    Small gradients that are pending sums, such as those of norms under sequence parallelism, are reduced together at the end of
    the backward pass that accumulates them. Until then their layout says that they are pending.

    Without this a gradient may stay pending where ranks hold terms of a sum. That is right as well, and optimizers accept it,
    because the layout of the gradient says what has been reduced; but each reader would reduce it anew.
    """
    # the id, because a copy has the attributes of the original and none of its hooks
    setattr(p, _WATCHED, id(p))
    hook = _reduce(p.sharding) if isinstance(p, DTensor) else _plain_gradient
    if hook not in restore_hooks(p):
        p.register_hook(hook)


@lru_cache(maxsize=4096)
def _reduce(layout: Layout) -> Callable[[Tensor], Tensor]:
    """A hook that redistributes a gradient to a layout, or leaves it pending until the end of the backward pass.

    One function per layout: hooks are compared, and compilers trace functions rather than objects.
    """
    return lambda grad: _settle(grad, layout)


@call_in_graph
def _settle(grad: Tensor, layout: Layout) -> Tensor:
    if not isinstance(grad, DTensor) or grad.sharding is layout or grad.is_sparse:
        return grad
    if not same_sizes(grad.shape, layout.shape):
        return grad
    return grad if _postpone(grad, layout) else grad.redistribute(placements=layout.placements)


def _postpone(grad: DTensor, target: Layout) -> bool:
    """Have a gradient be reduced with others after it was accumulated, if it is one that can be."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    pending = grad.sharding
    # by the layout, so that ranks with blocks of other sizes decide alike
    ranks = math.prod(pending.axes.sizes[a] for a in pending.sharded)
    nbytes = grad.numel() * grad.dtype.itemsize // ranks
    if (
        nbytes >= _LARGE
        or pending.with_partial({}) is not target
        or any(op != "sum" for _, op in pending.partial)
    ):
        return False
    p = accumulating_leaf()
    if p is None or has_accumulation_hooks(p):  # someone reads the gradient before the pass ends
        return False
    before = p.grad
    if before is not None:
        if not isinstance(before, DTensor) or before.dtype is not grad.dtype or before.is_sparse:
            return False
        if before.sharding is not target and before.sharding is not pending:
            return False
        if before.sharding is target:
            # pending as well, so that the gradients are added without communication
            p.grad = before.redistribute(placements=pending.placements)
    _sums_of_pass().add(p, before, nbytes)
    return True


class _PendingSums:
    """The parameters whose gradients one backward pass leaves pending, with what their gradients were before."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._bytes = 0

    def add(self, p: Tensor, before: Tensor | None, nbytes: int) -> None:
        """Note a parameter whose gradient is about to be accumulated."""
        if self._bytes + nbytes > _MOST:
            self.reduce()
        self._waiting.setdefault(id(p), (p, before))
        self._bytes += nbytes

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the pending gradients; a parameter that had a gradient before the pass keeps its memory."""
        waiting = [
            (p, p.grad, before)
            for p, before in self._waiting.values()
            if isinstance(p.grad, DTensor) and p.grad.sharding.partial
        ]
        self._waiting, self._bytes = {}, 0
        targets = [pending.sharding.with_partial({}) for _, pending, _ in waiting]
        reduced = redistribute_many([pending for _, pending, _ in waiting], targets)
        for (p, _, before), grad in zip(waiting, reduced, strict=True):
            if isinstance(before, DTensor) and before.sharding is grad.sharding:
                p.grad = before.copy_(grad)
            else:
                p.grad = grad


_sums: WeakValueDictionary[int, _PendingSums] = WeakValueDictionary()


def _sums_of_pass() -> _PendingSums:
    """Those of the backward pass that runs; the pass owns them, so that one that fails leaves nothing."""
    number = current_backward()
    found = _sums.get(number)
    if found is None:
        found = _sums[number] = _PendingSums()
        at_backward_end(found.reduce)
    return found


def _plain_gradient(grad: Tensor) -> Tensor:
    """The gradient of a plain parameter, which counts as replicated, so that autograd hands it a DTensor."""
    return to_plain(grad)
