"""A block that is still on its way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """A block that a collective has yet to deliver; `wait` gives it, once and for all."""

    __slots__ = ("_block", "_finish", "device")

    def __init__(self, finish: Callable[[], Tensor], device: torch.device) -> None:
        self.device = device
        self._finish: Callable[[], Tensor] | None = finish
        self._block: Tensor | None = None

    def wait(self) -> Tensor:
        """The block, after the collective has ended."""
        if self._finish is not None:
            self._block, self._finish = self._finish(), None
        if self._block is None:
            raise RuntimeError("a pending block was waited for while it was being finished")
        return self._block
