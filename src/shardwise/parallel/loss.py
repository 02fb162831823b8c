"""Losses of logits whose class dim is split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Do nothing: `cross_entropy` of logits with a split class dim gathers no logits, inside or outside the context.

    torch requires the context for that. Here each op of a loss is correct for any layout and exchanges statistics
    where that is cheaper, so programs written for torch run unchanged with or without it.
    """
    yield
