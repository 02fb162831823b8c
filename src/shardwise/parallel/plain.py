"""Plain tensors of a parallelized module: inside they count as replicated, and so does what goes in; what comes out is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, is_simulated
from shardwise.layout import Replicate
from shardwise.plan.settings import current_settings, pop_settings, push_settings
from shardwise.tensor.consistency import check_equal
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.graph_calls import call_in_graph

__all__ = [
    "count_plain_as_replicated",
    "count_targets_as_replicated",
    "module_input",
    "plain_as_replicated",
    "to_plain",
]


@partial(call_in_graph, changes_state=True)
def count_plain_as_replicated() -> None:
    """Have plain tensors count as replicated until `pop_settings`, compared where that is asked for or costs nothing."""
    compare = is_simulated() or current_settings().plain == "check"
    push_settings(plain="check" if compare else "replicate")


@contextmanager
def plain_as_replicated() -> Iterator[None]:
    """`count_plain_as_replicated` inside the block."""
    count_plain_as_replicated()
    try:
        yield
    finally:
        pop_settings()


@partial(call_in_graph, changes_state=True)
def count_targets_as_replicated() -> None:
    """Have plain operands of losses count as replicated until `pop_settings`; elsewhere they are what they were."""
    policy = current_settings().plain
    if policy == "error":
        push_settings(plain="losses")
    else:
        push_settings(plain="check" if is_simulated() else policy)


def module_input(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain input as the module takes it: replicated if its gradient is wanted, so that that is plain as well.

    In a simulation also one that differs between ranks, of which some may be no ranks of one mesh: along other axes.
    """
    if isinstance(t, DTensor):
        return t
    if isinstance(t, PerRank):
        check_equal(t, mesh, "A parallelized module")
    elif not (t.requires_grad and torch.is_grad_enabled()):
        return t
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim)


def to_plain(t: Tensor, *, per_rank: bool = False) -> Tensor:
    """A tensor as code outside of a module takes it: the full one on each rank; in a simulation one for all of them.

    Args:
        t: a DTensor, or a tensor that is returned as it is.
        per_rank: in a simulation, return the tensors of all ranks, which may differ.
    """
    if not isinstance(t, DTensor):
        return t
    if per_rank or not is_simulated():
        return t.full_tensor()
    full = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return _ToPlain.apply(full)  # type: ignore[no-untyped-call, no-any-return]


class _ToPlain(torch.autograd.Function):
    """In a simulation: a replicated DTensor as one plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh = x.device_mesh
        block = x._local_tensor
        first, *others = block.ranks if isinstance(block, PerRank) else (block,)
        if any(not _same_values(first, other) for other in others):
            raise RuntimeError(
                f"A replicated output of shape {tuple(x.shape)} differs between the simulated ranks.\n"
                "  why: The module computed it from plain tensors or blocks that differ between ranks.\n"
                "  fix: Pass what differs between ranks as a DTensor."
            )
        return first.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return DTensor.from_local(grads[0], ctx.mesh, [Replicate()] * ctx.mesh.ndim)


def _same_values(a: Tensor, b: Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
