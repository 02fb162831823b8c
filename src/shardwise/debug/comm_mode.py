"""CommDebugMode: how many collectives a piece of program used."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed._functional_collectives  # registers the names below

from shardwise.comm import Ledger, counting

__all__ = ["CommDebugMode"]

# Under torch's names, which programs look them up by.
_funcol = torch.ops.c10d_functional
_OPS: dict[str, Any] = {
    "all-gather": _funcol.all_gather_into_tensor,
    "all-reduce": _funcol.all_reduce,
    "reduce-scatter": _funcol.reduce_scatter_tensor,
    "all-to-all": _funcol.all_to_all_single,
    "permute": _funcol.all_to_all_single,
    "broadcast": torch.ops.c10d.broadcast_,
    "scatter": torch.ops.c10d.scatter_,
}


class CommDebugMode:
    """Counts the collectives that DTensors use inside the block.

    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,))
    ...     x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    ...     with CommDebugMode() as comm:
    ...         y = x.redistribute(placements=[sw.Replicate()])
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 16)
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self.ledger = self._open.enter_context(counting())
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def get_comm_counts(self) -> dict[Any, int]:
        """How often each collective was used, by torch's op."""
        return Counter(_OPS[entry.step] for entry in self.ledger.entries)

    def get_total_counts(self) -> int:
        """How many collectives there were."""
        return self.ledger.collectives

    def get_total_bytes(self) -> int:
        """How many bytes were sent: by this rank, or in a simulation by all of them."""
        return int(self.ledger.bytes)
