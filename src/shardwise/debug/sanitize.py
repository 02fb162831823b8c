"""`sanitize`: checking that the ranks agree on what they compute."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.call.trace import select_watcher, watch_calls
from shardwise.debug.call_watcher import CallWatcher
from shardwise.tensor.observe import observing

__all__ = ["sanitize"]


class sanitize:  # noqa: N801 - a context manager that reads as a word
    """Check inside the block that all ranks compute the same, and raise the same error on all of them where they do not.

    All ranks of a mesh must run the same ops on DTensors in the same order, with the same layouts, dtypes and numbers; replicated
    tensors, and plain ones that count as replicated, must have the same bits; blocks must fit their layouts; blocks that
    `from_local` gets, and the gradients that arrive at `to_local`, must have the placements that are claimed; random numbers must be
    drawn from the same position. Ops in `whole_step` programs and ops on plain tensors are not seen.

    Values are compared as fingerprints when an op reads them, or at the end of the step in which they were written to. A step ends
    with each `step()` of an optimizer, and where the program says so.

    Args:
        every: check every so many steps; the others cost nothing.

    Raises:
        DivergenceError: the ranks do not agree. It names both sides.

    Each checked step sends one all-gather of 8 KiB per rank for 512 values or ops, and one at its end.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2), sw.sanitize():
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     block = sw.per_rank(lambda rank: torch.tensor([1.0, rank]))
    ...     x = sw.DTensor.from_local(block, mesh, [sw.Replicate()])
    Traceback (most recent call last):
    shardwise.debug.divergence.DivergenceError: The blocks that from_local got are not the same on all ranks.
      rank 0: from_local, f32[2] = [1, 0] at <doctest shardwise.debug.sanitize.sanitize[1]>:4 in <module>
      rank 1: from_local, f32[2] = [1, 1] at <doctest shardwise.debug.sanitize.sanitize[1]>:4 in <module>
      why: Ranks that differ only along an axis where the placement is Replicate() must hold the same bits.
      fix: Pass the placement that they have, DTensor.from_local(t, mesh, [Shard(dim)]) or [Partial()], or make them equal.
    """

    def __init__(self, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"sanitize: every is {every!r}.\n"
                "  why: Every so many steps are checked, so it is a number of steps.\n"
                "  fix: sanitize(every=1) checks all of them, sanitize(every=100) one in a hundred."
            )
        self._every = every
        self._steps = 0
        self._open = ExitStack()
        self._watcher = CallWatcher()

    @property
    def compared(self) -> int:
        """How many ops and values were compared."""
        return sum(log.compared for log in self._watcher.logs.values())

    @property
    def comparisons(self) -> int:
        """How many all-gathers that took."""
        return sum(log.comparisons for log in self._watcher.logs.values())

    def __enter__(self) -> Self:
        self._open.enter_context(watch_calls(self._watcher, lambda: self._watcher.is_active))
        self._open.enter_context(observing(self._watcher))
        self._open.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if error is None and self._watcher.is_active:
            self._watcher.end_step()

    def step(self) -> None:
        """End a step, in a program that has no optimizer; all ranks must call it."""
        if self._watcher.is_active:
            self._watcher.end_step()
        self._steps += 1
        self._watcher.is_active = self._steps % self._every == 0
        select_watcher()

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step()
