"""CommDebugMode: counts of the collectives that a part of a program uses."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from shardwise.comm import Sent, counting
from shardwise.comm.ledger import Ledger
from shardwise.debug.module_calls import GLOBAL, ModuleCalls
from shardwise.debug.tracing_table import Operation, table, tree
from shardwise.torch_internals.collective_ops import CollectiveObserver, collective_ops, grouped_ops

__all__ = ["CommDebugMode"]

_Counts = dict[str, dict[str, Counter[Any]]]


def _no_counts() -> dict[str, Counter[Any]]:
    return {"forward": Counter(), "backward": Counter()}


class CommDebugMode:
    """Count the collectives inside the `with` block, which starts from zero each time it is entered.

    Those of DTensors are counted, and those that the program calls itself: the functions of `torch.distributed` and
    functional collectives. They are also counted by module and direction (`comm_module_counts`).

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
        self._open = ExitStack()
        self._reset()

    def _reset(self) -> None:
        self.ledger = Ledger()
        self.advanced_module_tracker = ModuleCalls()
        self._own: Counter[Any] = Counter()
        self._by_module: _Counts = {}
        self._operations: dict[str, list[Operation]] = {}

    def __enter__(self) -> Self:
        self._reset()
        self.ledger = self._open.enter_context(counting(lambda entry: self._attribute(_op_of(entry))))
        self._open.enter_context(self.advanced_module_tracker.following())
        self._open.enter_context(CollectiveObserver(self._count, self._operate))
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def _count(self, op: Any) -> None:
        """Count a collective that the program calls itself."""
        self._own[op] += 1
        self._attribute(op)

    def _operate(self, op: Any, args: tuple[Any, ...]) -> None:
        """Note an op for the innermost module that the program is inside of."""
        direction, _ = self.advanced_module_tracker.current
        found = self._operations.setdefault(self.advanced_module_tracker.innermost, [])
        found.append(Operation.of(op, args, direction))

    def _attribute(self, op: Any) -> None:
        """Count a collective for each module that the program is inside of."""
        direction, names = self.advanced_module_tracker.current
        for name in names:
            counts = self._by_module.setdefault(name, _no_counts())
            counts[direction][op] += 1

    @property
    def comm_counts(self) -> dict[Any, int]:
        """The number of calls of each collective, by the op that torch's mode counts it under; 0 for other ops.

        A step counts as what it is for: a gather of uneven blocks is an all-gather although it calls an all-to-all.
        Steps that torch has no op for count as what they call: an exchange is an all-to-all, and agreement on a seed
        is a broadcast. Collectives on the blocks of many tensors, as of `fully_shard`, count under the ops of
        `torch.ops.c10d` that torch's FSDP calls.
        """
        return Counter(map(_op_of, self.ledger.entries)) + self._own

    def get_comm_counts(self) -> dict[Any, int]:
        """The same as `comm_counts`."""
        return self.comm_counts

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return self.ledger.collectives + self._own.total()

    def get_total_bytes(self) -> int:
        """The number of bytes that DTensors sent: from this rank, or in a simulation from all ranks together."""
        return int(self.ledger.bytes)

    @property
    def comm_module_counts(self) -> _Counts:
        """The counts by module name, then "forward" or "backward", then op; "Global" is the whole program.

        A collective counts for the module that called it and for all modules around that.
        """
        return {GLOBAL: _no_counts(), **self._by_module}

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The parameters of the modules that were called, by module name and parameter name."""
        return {n: m.parameters for n, m in self._modules().items() if m.parameters}

    def get_sharding_info(self) -> dict[str, Any]:
        """The placements of the parameters that are DTensors, by module and parameter name: `MLP.net1.weight`."""
        return {f"{n}.{p}": placed for n, m in self._modules().items() for p, placed in m.placements.items()}

    def _modules(self) -> dict[str, Any]:
        return self.advanced_module_tracker.module_helper_dict

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The modules that were called, as a tree, with the collectives of their forward and backward passes.

        Args:
            noise_level: 0 for the counts; from 1 on also the class and the parameters of each module with their
                placements, and the ops on DTensors; from 2 on all ops; from 3 on also those that compute nothing.
        """
        return table(self._modules(), self.comm_module_counts, self._operations, noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Append the table of `generate_comm_debug_tracing_table` to a file."""
        with Path(file_name).open("a") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write what `generate_comm_debug_tracing_table` shows to a JSON file: one object per module."""
        found = tree(self._modules(), self.comm_module_counts, self._operations, noise_level)
        Path(file_name).write_text(json.dumps(found, indent=4))

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


_OPS = collective_ops()
_GROUPED_OPS = grouped_ops()


def _op_of(entry: Sent) -> Any:
    """The op of a collective, or its name if torch has no such op."""
    ops = _GROUPED_OPS if entry.grouped else _OPS
    return ops.get(entry.step.replace("-", "_")) or ops.get(entry.called, entry.called)
