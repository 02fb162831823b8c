"""Selective activation checkpointing: the modes that save the results of chosen ops, and count all of them."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["outside_selective_checkpoints"]

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class outside_selective_checkpoints:  # noqa: N801 - a context manager
    """Inside, ops are not part of a checkpointed function: their results are neither saved nor expected.

    The recomputation must run the ops of the forward pass again, in their order. What is gathered for one of the two, and not
    for the other, does not count.

    >>> ops = []
    >>> def policy(ctx, op, *args, **kwargs):
    ...     ops.append(op)
    ...     return False
    >>> forward, _ = checkpoint.create_selective_checkpoint_contexts(policy)
    >>> with forward, outside_selective_checkpoints():
    ...     _ = torch.ones(2) * 2
    >>> ops
    []
    """

    __slots__ = ("_popped",)

    def __enter__(self) -> None:
        self._popped: list[TorchDispatchMode] | None = None
        if not torch._C._len_torch_dispatch_stack():
            return
        found = [i for i, m in enumerate(_get_current_dispatch_mode_stack()) if isinstance(m, _SELECTIVE)]
        if found:
            above = len(_get_current_dispatch_mode_stack()) - found[0]
            self._popped = [_pop_mode() for _ in range(above)]
            _push(self._popped, selective=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popped is not None:
            for mode in self._popped:
                if not isinstance(mode, _SELECTIVE):
                    _pop_mode()
            _push(self._popped, selective=True)


def _push(popped: list[TorchDispatchMode], *, selective: bool) -> None:
    """Push modes back in their order, with or without those of selective checkpointing."""
    for mode in reversed(popped):
        if selective or not isinstance(mode, _SELECTIVE):
            _push_mode(mode)
