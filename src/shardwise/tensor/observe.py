"""Observers of what the program states about values: a layout that it claims for blocks, a position in a random stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Observer", "observers", "observing"]


class Observer(Protocol):
    """What wants to know of claims; on processes it is called on every rank of the mesh."""

    def claim(self, block: Tensor, spec: Any, what: str) -> None:
        """The program, or autograd, says that a block belongs to a tensor of this spec; `what` says where."""

    def claim_equal(self, plain: Tensor, mesh: Any, what: str) -> None:
        """The program says that a plain tensor is the same on all ranks of a mesh."""

    def draw(self, mesh: Any, seed: int, position: int) -> None:
        """An op on a mesh is about to draw random numbers from this position of a stream."""


observers: list[Observer] = []
"""Those that observe; usually none."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer know of claims and draws inside the block.

    >>> with observing(None):
    ...     len(observers)
    1
    """
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
