"""The door for communication that the program did not ask for.

Every such communication runs through this module: it applies the policy first, and then runs the plan. What the program asks
for by name (`redistribute`, `full_tensor`, `item()`, ...) does not come here. An import contract holds both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.run import run
from shardwise.layout import Layout, contiguous_stride
from shardwise.layout.sizes import as_size
from shardwise.plan import Plan, plan_redistribute
from shardwise.plan.settings import current_settings
from shardwise.tensor.abstract_tensor import AbstractTensor
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.errors import CommunicationError

__all__ = ["announce", "communication", "run_plan", "to_layout"]

_approved: ContextVar[bool] = ContextVar("approved", default=False)


def run_plan(op: Any, plan: Plan, block: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take the local tensor of an op's operand through a plan, if the policy allows it."""
    enforce_policy(op, [plan])
    return run(plan, block, mesh)


def to_layout(op: Any, x: DTensor, target: Layout) -> DTensor:
    """Redistribute an op's operand beneath autograd, if the policy allows it."""
    spec = x._spec
    if spec.layout is target:
        return x
    plan = plan_redistribute(spec.layout, target, spec.dtype.itemsize)
    after = spec.with_layout(target, contiguous_stride(target.shape))
    if isinstance(x, AbstractTensor):
        return x.moved(plan, after)
    return DTensor(run_plan(op, plan, x._local_tensor, spec.mesh), after)


@contextmanager
def communication(op: Any, plans: Sequence[Plan | None]) -> Iterator[None]:
    """Apply the policy to everything that a call is about to send; inside the block it is not applied again."""
    enforce_policy(op, plans)
    token = _approved.set(True)
    try:
        yield
    finally:
        _approved.reset(token)


def enforce_policy(op: Any, plans: Sequence[Plan | None]) -> None:
    """Refuse or warn of what an op would send, according to the policy."""
    how = current_settings().implicit
    if how == "allow" or _approved.get():
        return
    moving = [
        plan for plan in plans if plan is not None and (plan.steps if how == "strict" else plan.collectives)
    ]
    if not moving:
        return
    steps = "; ".join(f"{plan.source} must move: {', '.join(map(str, plan.steps))}" for plan in moving)
    targets = ", ".join(dict.fromkeys(str(plan.target) for plan in moving))
    announce(op, sum(plan.bytes for plan in moving), f"It runs on {targets}, so {steps}.")


def announce(op: Any, nbytes: int, why: str, fix: str = "Redistribute the operands first") -> None:
    """Apply the policy to communication that no plan describes."""
    how = current_settings().implicit
    if how == "allow" or _approved.get():
        return
    does = f"communicate {as_size(nbytes):,} B" if nbytes or how != "strict" else "move an operand"
    error = CommunicationError(
        f"Implicit redistribution: {op} would {does}.",
        why=why,
        fix=f'{fix}, or allow it: with policy(implicit="allow"): ...',
    )
    if how != "warn":
        raise error
    warnings.warn(str(error), stacklevel=3)
