"""Where a capture sees how blocks are moved and filled: steps of plans and random draws are recorded as wholes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan import GroupedStep, Step

__all__ = ["Recorder", "recorders"]


class Recorder(Protocol):
    """Records a program on blocks; the blocks it is given and returns have no values."""

    def move(self, step: Step, block: Tensor, mesh: DeviceMesh) -> Tensor:
        """Record a step of a plan; returns the block after it."""

    def move_many(self, step: GroupedStep, blocks: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
        """Record a step of a grouped plan; returns the blocks after it."""

    def fill(self, block: Tensor, numbers: str, mesh: DeviceMesh, others: Sequence[Tensor]) -> None:
        """Record a random draw that fills a block; `numbers` says with what, as text."""

    def heard(self, what: str) -> None:
        """A random generator was seeded ("seed"), or set back to an earlier state ("state"); it may raise."""

    def pause(self) -> Any:
        """A context in which ops run and are not recorded."""


recorders: list[Recorder] = []
"""The capture that runs, if any."""
