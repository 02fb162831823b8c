"""Saving: planned at once, written now or in the background."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.aside import aside_path, remove_left_files
from shardwise.checkpoint.description import describe_state
from shardwise.checkpoint.errors import CheckpointError, CheckpointStateError
from shardwise.checkpoint.exchange import Report, agree, next_number, run_token
from shardwise.checkpoint.random_state import random_position
from shardwise.checkpoint.save_plan import (
    SavePlan,
    is_alone,
    plan_save,
    stored_of,
    this_rank,
    world_size,
)
from shardwise.checkpoint.staging import Staged, bits_in, stage
from shardwise.checkpoint.state_digest import compare_digests, state_digest
from shardwise.checkpoint.write import commit, write_errors, write_rank
from shardwise.comm import is_simulated

__all__ = ["TIMEOUT", "Saving"]

TIMEOUT = 1800.0
_one_at_a_time = threading.Lock()
"""Held while a process without others saves: threads that save to one path would write to one directory. On several ranks, the
exchanges are in one order."""


class Saving:
    """A save: planned at construction, written by `run`, which may be in another thread after `stage`.

    Args:
        state: what is saved.
        path: the directory of the checkpoint.
        timeout: seconds to wait for the other ranks.
        after: called on rank 0 when the checkpoint is there.
    """

    def __init__(
        self, state: Any, path: Path, timeout: float, after: Callable[[], object] | None = None
    ) -> None:
        self.path, self.timeout, self.after = path, timeout, after
        self.aside: Path | None = None
        self.number, self.alone, self.rank = next_number("save"), is_alone(), this_rank()
        self.ranks = range(world_size()) if is_simulated() else [self.rank]
        self.tensors: Mapping[str, Tensor] = {}
        self.staged: dict[int, Staged] = {}
        self.error: CheckpointError | None = None
        try:
            self._describe(state)
        except CheckpointError as error:
            self.error = error  # `run` tells the other ranks, which would wait otherwise

    def _describe(self, state: Any) -> None:
        try:
            described = describe_state(state)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointStateError(
                f"The state could not be read: {type(error).__name__}: {error}",
                why="A state_dict() raised it.",
                fix="See the traceback above this one.",
            ) from error
        self.tensors = described.tensors
        self.plan: SavePlan = plan_save({n: stored_of(t) for n, t in self.tensors.items()}, world_size())
        self.content = {"state": described.tree, "aliases": described.aliases, "random": random_position()}

    def stage(self) -> None:
        """Copy what this process writes, so that the program may change it."""
        if self.error is not None:
            self.run()
        self.staged = {rank: stage(self.plan, rank, self.tensors) for rank in self.ranks}
        self.tensors = {}

    def run(self) -> None:
        """Write the data of this rank, and wait until the checkpoint is there."""
        try:
            with _one_at_a_time if self.alone else nullcontext():
                agree(self.number, self._work, self._commit, self.timeout, self.alone)
        except CheckpointError:
            if self.rank == 0 and self.aside is not None:
                shutil.rmtree(self.aside, ignore_errors=True)  # the next save may need the room
            raise

    def _work(self) -> Report:
        # first of all: the others wait for the token of rank 0, also where its state is wrong
        token = run_token(self.timeout, self.alone)
        if self.error is not None:
            raise self.error
        self.aside = aside_path(self.path, token)
        return {"reports": self._write(self.aside), **self._digest()}

    def _write(self, aside: Path) -> list[Report]:
        """Write the files of this process aside."""
        reports: list[Report] = []
        with write_errors(self.path):
            if self.rank == 0:
                remove_left_files(self.path, keep_unknown=True)
            for rank in self.ranks:
                staged = self.staged.pop(rank, None)
                cells = bits_in(self.tensors, rank) if staged is None else staged.cells
                reports.append(write_rank(self.plan, rank, aside, cells))
                if staged is not None:
                    staged.give_back()
        return reports

    def _digest(self) -> Report:
        random = self.content[
            "random"
        ]  # before the ranks have agreed on a seed, that of rank 0 is the one that counts
        same = self.content if random["agreed"] else {**self.content, "random": random["position"]}
        keys = {n: f"{s.dtype} {s.layout}" for n, s in self.plan.stored.items()}
        return state_digest(keys, same, self.path)

    def _commit(self, reports: Sequence[Report]) -> Report:
        compare_digests(reports, "save")
        files = [f for r in reports for f in r["reports"]]
        if self.aside is None:
            raise RuntimeError("unreachable: this rank has reported what it wrote")
        with write_errors(self.path):
            commit(self.path, self.aside, {**self.content, "tensors": self.plan.metadata}, files)
            if self.after is not None:
                self.after()
        return {}
