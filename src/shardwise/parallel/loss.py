"""Losses over split classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute `cross_entropy` of logits whose classes are split without gathering them: as outside of it.

    Programs written for torch say where they want that. Here each op of a loss is right for any layout and exchanges
    statistics where that is cheaper, so there is nothing to switch, and no gradient to get wrong by switching.
    """
    yield
