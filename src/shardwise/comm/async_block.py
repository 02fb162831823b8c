"""The block of a collective that has not completed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """The result of a collective that has been started. `wait` completes it, once."""

    __slots__ = ("_block", "_finish", "device")

    def __init__(self, finish: Callable[[], Tensor], device: torch.device) -> None:
        self.device = device
        self._finish = finish
        self._block: Tensor | None = None

    def wait(self) -> Tensor:
        """The block, after the collective has completed."""
        if self._block is None:
            self._block = self._finish()
            del self._finish  # it holds the source block
        return self._block
