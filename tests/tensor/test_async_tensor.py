"""Results that are still being received, and the blocks of ranks that are not on the mesh, on processes."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard


def async_results():
    """The kinds of block that asynchronous redistributions give, and whether their values are right."""
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.arange(32.0).view(8, 4)
    out = []
    for source, target in (
        (Shard(0), Replicate()),
        (Shard(1), Replicate()),
        (Partial(), Replicate()),
        (Partial(), Shard(0)),
    ):
        x = sw.distribute_tensor(whole, mesh, [source])
        y = x.redistribute(placements=[target], async_op=True)
        block = y.view(y.shape).to_local()
        kind, is_waiting = type(block), isinstance(block, AsyncCollectiveTensor) and not block.completed
        expected = whole.chunk(4)[mesh.get_local_rank()] if target.is_shard() else whole
        right = torch.equal(block + 1, expected + 1) and torch.equal(y.to_local() + 0, expected)
        y.to_local().zero_()  # it is the block itself
        right &= not y.to_local().any().item() and type(y.view(y.shape)) in (DTensor, type(y))
        out.append((kind.__name__, is_waiting, right))
    grad = sw.distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    out.append(type(grad.redistribute(placements=[Replicate()], async_op=True).to_local()).__name__)
    few = sw.DeviceMesh("cpu", [0, 2])
    total = DTensor.from_local(torch.ones(4, 3), few, [Shard(0)]).sum().to_local()
    return out, total.tolist()


def test_to_local_of_a_result_that_is_being_received_does_not_wait(workers):
    for rank, (found, total) in enumerate(workers.run(async_results)):
        waits = ("AsyncCollectiveTensor", True, True)
        assert found == [waits, ("Tensor", False, True), waits, waits, "Tensor"]
        assert total == (12.0 if rank in (0, 2) else 0.0)
