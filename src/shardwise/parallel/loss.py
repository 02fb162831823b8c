"""Losses of logits whose class dim is split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.parallel.plain import count_targets_as_replicated
from shardwise.plan.settings import pop_settings

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside the block, plain targets and class weights of a loss count as replicated, as in torch.

    A simulation and `policy(plain="check")` verify that they are. Other ops refuse plain tensors beside DTensors as outside of the
    block, so the forward pass of a model may be inside. Nothing else changes: `cross_entropy` of logits with a split
    class dim gathers no logits, inside or outside the block, because each op of a loss is correct for any layout and
    exchanges statistics where that is cheaper.

    >>> import torch, shardwise as sw
    >>> with sw.simulate(2):
    ...     mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     logits = sw.zeros(3, 4, device_mesh=mesh, placements=[sw.Shard(1)])
    ...     with loss_parallel():
    ...         print(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3, 1])).item())
    1.3862943649291992
    """
    count_targets_as_replicated()
    try:
        yield
    finally:
        pop_settings()
