"""The block of a collective that has not completed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """The result of a collective that has been started. `wait` completes it, once.

    Args:
        finish: waits for the collective and unpacks what it received.
        device: the device of the block.
        coming: the block itself, if what is received needs no unpacking: memory that is being written.
    """

    __slots__ = ("_block", "_coming", "_finish", "device")

    def __init__(
        self, finish: Callable[[], Tensor], device: torch.device, coming: Tensor | None = None
    ) -> None:
        self.device = device
        self._finish = finish
        self._coming = coming
        self._block: Tensor | None = None

    @property
    def coming(self) -> Tensor | None:
        """The block while it is being written, if it is received as it is."""
        return self._coming if self._block is None else None

    def wait(self) -> Tensor:
        """The block, after the collective has completed."""
        if self._block is None:
            self._block = self._finish()
            del self._finish  # it holds the source block
            self._coming = None
        return self._block
