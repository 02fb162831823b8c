"""CommDebugMode: counts of the collectives that a part of a program uses."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

from shardwise.comm import Sent, counting
from shardwise.comm.ledger import Ledger
from shardwise.torch_internals.collective_ops import collective_ops

__all__ = ["CommDebugMode"]


class CommDebugMode:
    """Count the collectives of DTensors inside the `with` block, which starts from zero each time it is entered.

    >>> import torch
    >>> import shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,))
    ...     x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    ...     with CommDebugMode() as comm:
    ...         y = x.redistribute(placements=[sw.Replicate()])
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 16)
    >>> comm.comm_counts[torch.ops.c10d_functional.all_gather_into_tensor]
    1
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self.ledger = self._open.enter_context(counting())
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    @property
    def comm_counts(self) -> dict[Any, int]:
        """The number of calls of each collective, by the op that torch's mode counts it under; 0 for other ops.

        A step counts as what it is for: a gather of uneven blocks is an all-gather although it calls an all-to-all.
        Steps that torch has no op for count as what they call: an exchange is an all-to-all, and agreement on a seed
        is a broadcast.
        """
        return Counter(map(_op_of, self.ledger.entries))

    def get_comm_counts(self) -> dict[Any, int]:
        """The same as `comm_counts`."""
        return self.comm_counts

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return self.ledger.collectives

    def get_total_bytes(self) -> int:
        """The number of bytes sent: by this rank, or in a simulation by all ranks together."""
        return int(self.ledger.bytes)

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


_OPS = collective_ops()


def _op_of(entry: Sent) -> Any:
    """The op of a collective, or its name if torch has no such op."""
    return _OPS.get(entry.step.replace("-", "_")) or _OPS.get(entry.called, entry.called)
