"""Ops that write to a list of tensors count the writes as on one device, whatever the layouts."""

import itertools

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard

CALLS = {
    "unbind_copy": (lambda x, out: torch.unbind_copy(x, out=out), (4,)),
    "split_copy": (lambda x, out: torch.split_copy(x, 1, out=out), (1, 4)),
    "split_with_sizes_copy": (lambda x, out: torch.split_with_sizes_copy(x, [1, 1], out=out), (1, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_versions_and_values(name):
    call, shape = CALLS[name]
    x, expected = torch.randn(2, 4), [torch.zeros(shape) for _ in range(2)]
    call(x, expected)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        for source, target in itertools.product(
            [Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(0), Shard(len(shape) - 1)]
        ):
            out = [sw.distribute_tensor(torch.zeros(shape), mesh, [target]) for _ in range(2)]
            call(sw.distribute_tensor(x, mesh, [source]), out)
            assert [t._version for t in out] == [t._version for t in expected]
            assert all(torch.equal(a.full_tensor().ranks[0], b) for a, b in zip(out, expected, strict=True))
