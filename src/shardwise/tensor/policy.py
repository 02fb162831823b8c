"""Policy: what happens when an op would communicate without being asked, or meets a plain tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from shardwise.layout import LayoutError
from shardwise.plan import Plan

__all__ = ["CommunicationError", "Implicit", "implicit_replication", "mind", "policy", "replicates"]

Implicit = Literal["allow", "warn", "error"]

_implicit: ContextVar[Implicit] = ContextVar("implicit", default="allow")
_replicates: ContextVar[bool] = ContextVar("replicates", default=False)


class CommunicationError(LayoutError):
    """An op would have communicated where that is forbidden."""


@contextmanager
def policy(*, implicit: Implicit = "allow") -> Iterator[None]:
    """Say what happens inside the block when an op would communicate without being asked to.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
    ...     with sw.policy(implicit="error"):
    ...         y = x + x                       # nothing to send
    ...         x.cumsum(0)
    Traceback (most recent call last):
    shardwise.tensor.policy.CommunicationError: aten.cumsum.default would communicate: 64 B.
      why: it runs on [4, 4], and [4:tp, 4] must move: all-gather over tp: [4:tp, 4] -> [4, 4]
      fix: redistribute first, or allow it with policy(implicit="allow")
    """
    if implicit not in ("allow", "warn", "error"):
        raise ValueError(
            f"policy(implicit={implicit!r}) is not one.\n"
            "  why: an op that would communicate is allowed, warned of, or refused\n"
            '  fix: use "allow", "warn" or "error"'
        )
    token = _implicit.set(implicit)
    try:
        yield
    finally:
        _implicit.reset(token)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors that meet DTensors inside the block to be the same on every rank."""
    token = _replicates.set(True)
    try:
        yield
    finally:
        _replicates.reset(token)


def replicates() -> bool:
    """Whether plain tensors count as replicated."""
    return _replicates.get()


def mind(func: Any, plans: Sequence[Plan | None]) -> None:
    """Apply the policy to what an op is about to send."""
    how = _implicit.get()
    if how == "allow":
        return
    sending = [plan for plan in plans if plan is not None and plan.collectives]
    if not sending:
        return
    sent = sum(plan.bytes for plan in sending)
    steps = "; ".join(f"{plan.source} must move: {', '.join(map(str, plan.steps))}" for plan in sending)
    error = CommunicationError(
        f"{func} would communicate: {sent:,} B.",
        why=f"it runs on {', '.join(str(plan.target) for plan in sending)}, and {steps}",
        fix='redistribute first, or allow it with policy(implicit="allow")',
    )
    if how == "error":
        raise error
    warnings.warn(str(error), stacklevel=2)
