"""Graphs that `make_fx` records of DTensors have redistributions as calls, not as constants."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw
from shardwise import DTensor, Replicate, Shard


def values(x):
    return x.full_tensor().ranks[0]


def gradient(x):
    leaf = x.detach().requires_grad_()
    loss = (leaf.redistribute(tp=Shard(1)) * leaf.redistribute(tp=Replicate())).sum()
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.redistribute(tp=Replicate()) + 1,
        lambda x: x.redistribute(tp=Shard(1)).cumsum(0).redistribute(tp=Shard(0)) * x,
        lambda x: x.sum(0).redistribute(tp=Replicate()) - x,
        lambda x: x.redistribute(placements=x.placements) * 2,
        gradient,
    ],
)
def test_redistribution_is_recorded(f):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        first, other = (sw.distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]) for _ in range(2))
        graph = make_fx(f)(first)
        assert any(getattr(n.target, "__name__", "") == "redistribute" for n in graph.graph.nodes)
        assert torch.equal(values(graph(other)), values(f(other)))


def test_blocks_are_refused_where_they_would_be_constants():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"fix: make_fx\(lambda block"):
            make_fx(lambda x: x.to_local() * 2)(x)


def test_blocks_of_a_rank_are_recorded():
    with sw.compile.fake_mesh((2,), ("tp",)) as mesh:
        x, y = (DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)]) for _ in range(2))
        graph = make_fx(lambda x: x.to_local() * 2)(x)
        assert torch.equal(graph(y), y.to_local() * 2)
