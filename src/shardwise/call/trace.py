"""Rungs: by which way an op ran, for whoever watches: its row, an offer, or on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from shardwise.plan import Plan

__all__ = ["Ran", "Rung", "tell", "watching"]

Rung = Literal["row", "offer", "whole"]


class Ran(NamedTuple):
    """A call that is about to run on a rung, and how its tensors will move."""

    op: Any
    rung: Rung
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    moves: Sequence[Plan | None]

    @property
    def sends(self) -> bool:
        """Whether anything is communicated to bring the inputs where they must be."""
        return any(plan is not None and plan.collectives for plan in self.moves)


_watchers: list[Callable[[Ran], None]] = []


@contextmanager
def watching(see: Callable[[Ran], None]) -> Iterator[None]:
    """Tell `see` of each call inside the block before it runs; what it calls itself is not told of.

    On real processes a call whose row moves nothing takes the short way, which tells nobody.

    >>> import torch, shardwise as sw
    >>> from shardwise.tensor import watching
    >>> with sw.simulate(2), watching(lambda ran: print(ran.op, ran.rung, ran.sends)):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
    ...     _ = x.exp().cumsum(0)
    aten.exp.default row False
    aten.cumsum.default row True
    """
    _watchers.append(see)
    try:
        yield
    finally:
        _watchers.remove(see)


def tell(
    op: Any, rung: Rung, args: tuple[Any, ...], kwargs: Mapping[str, Any], moves: Sequence[Plan | None] = ()
) -> None:
    """Tell whoever watches of a call."""
    if not _watchers:
        return
    ran, told = Ran(op, rung, args, kwargs, moves), list(_watchers)
    _watchers.clear()
    try:
        for see in told:
            see(ran)
    finally:
        _watchers[:] = told
