"""CheckpointManager: numbered checkpoints in one directory, of which the newest are kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.checkpoint.api import latest, load
from shardwise.checkpoint.aside import aside_path
from shardwise.checkpoint.background import finish_pending, start
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.metadata import checkpoint_number, checkpoint_path, complete_in
from shardwise.checkpoint.saving import TIMEOUT, Saving
from shardwise.checkpoint.staging import release_memory

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Checkpoints of a run, `step-00000100` and so on, in one directory.

    Args:
        path: the directory.
        keep: the number of checkpoints to keep; older ones are removed when a newer one is complete.
        every: `save_if_due` saves at steps that are multiples of it.
        background: save in the background.
        timeout: seconds to wait for the other ranks.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as path, CheckpointManager(path, keep=2, every=10) as manager:
    ...     for step in range(1, 41):
    ...         _ = manager.save_if_due({"x": torch.tensor(step), "step": step}, step)
    ...     manager.wait()
    ...     [p.name for p in manager.checkpoints()], manager.load(state := {"x": torch.tensor(0), "step": 0}), state
    (['step-00000030', 'step-00000040'], 40, {'x': tensor(40), 'step': 40})
    """

    def __init__(
        self,
        path: str | Path,
        keep: int = 3,
        every: int | None = None,
        *,
        background: bool = True,
        timeout: float = TIMEOUT,
    ) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise CheckpointError(
                f"CheckpointManager got keep={keep}, every={every}.",
                why="At least one checkpoint is kept, and steps are counted in whole numbers.",
                fix="CheckpointManager(path, keep=3, every=100)",
            )
        self.path, self.keep, self.every = checkpoint_path(path), keep, every
        self._background, self._timeout = background, timeout

    def save(self, state: Any, step: int) -> None:
        """Save a state as the checkpoint of this step; in the background it returns when the state is copied.

        Raises:
            CheckpointError: this save, or the one before in the background, failed; on all ranks.
        """
        finish_pending()
        saving = Saving(state, self.path / f"step-{step:08d}", self._timeout, self._remove_old)
        if self._background:
            saving.stage()
            start(saving.run)
        else:
            saving.run()

    def save_if_due(self, state: Any, step: int) -> bool:
        """Save if the step is a multiple of `every`; returns whether it was."""
        due = self.every is not None and step % self.every == 0
        if due:
            self.save(state, step)
        return due

    def load(self, into: Any, *, strict: bool = True, random: bool = True) -> int | None:
        """Load the newest checkpoint into a state, and return its step; None, and nothing changes, if there is none."""
        finish_pending()
        newest = latest(self.path)
        if newest is None:
            return None
        load(newest, into, strict=strict, random=random, timeout=self._timeout)
        return checkpoint_number(newest)

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return complete_in(self.path)

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        finish_pending()

    def _remove_old(self) -> None:
        """Remove old checkpoints and what interrupted saves have left; on rank 0, when a new checkpoint is there."""
        for path in self.checkpoints()[: -self.keep]:
            # first the name goes, so that one that is removed in part is never taken for a checkpoint
            path.rename(aside_path(path, "removed"))
        for left in self.path.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        release_memory()
