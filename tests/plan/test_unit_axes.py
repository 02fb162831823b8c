"""Placements on axes of size 1 are given back as they were set, and ops treat them as on larger axes."""

import copy

import pytest
import torch

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.layout import Layout

CASES = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Partial()),
    (Replicate(), Partial("max")),
    (Partial(), Partial("avg")),
    (Replicate(), Shard(1)),
    (Shard(0), Replicate()),
]


@pytest.fixture
def mesh():
    with sw.simulate(2):
        yield sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("placements", CASES, ids=str)
def test_placements_are_given_back_as_they_were_set(mesh, placements):
    x = torch.arange(12.0).view(4, 3)
    assert sw.distribute_tensor(x, mesh, placements).placements == placements
    assert (
        sw.distribute_tensor(x, mesh, [Shard(0), Replicate()]).redistribute(placements=placements).placements
        == placements
    )
    moved = (
        sw.distribute_tensor(x, mesh, [Shard(0), Shard(-1)])
        .requires_grad_()
        .redistribute(placements=placements)
    )
    assert moved.placements == placements
    local = DTensor.from_local(torch.ones(4, 3), mesh, placements)
    assert local.placements == placements
    if not any(p.is_partial() for p in placements):
        for make in (sw.zeros, sw.randn):
            assert make(4, 3, device_mesh=mesh, placements=placements).placements == placements


def test_a_redistribution_by_axis_keeps_the_others(mesh):
    x = sw.distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(1)])
    assert x.redistribute(dp=Shard(0)).placements == (Shard(0), Shard(1))
    assert x.redistribute(tp=Shard(0)).placements == (Replicate(), Shard(0))
    assert x.redistribute(tp=Replicate()).placements == (Replicate(), Replicate())


def test_copies_and_parameters_keep_them(mesh):
    x = sw.distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Shard(1)])
    want = (Shard(0), Shard(1))
    assert torch.nn.Parameter(x).placements == want
    assert copy.deepcopy(x).placements == want
    assert x.detach().placements == x.clone().placements == x.data.placements == want
    assert x.to(torch.float64).placements == want
    assert torch.zeros_like(x).placements == want


@pytest.mark.parametrize(
    ("run", "x", "w", "want"),
    [
        (lambda x, w: x @ w, Shard(0), Replicate(), Shard(0)),
        (lambda x, w: x @ w, Replicate(), Shard(1), Shard(1)),
        (lambda x, w: x @ w, Shard(1), Shard(0), Partial()),
        (lambda x, w: x @ w, Partial(), Replicate(), Partial()),
        (lambda x, w: x.relu(), Partial(), Replicate(), Replicate()),
        (lambda x, w: x.relu(), Partial("max"), Replicate(), Partial("max")),
        (lambda x, w: x.t(), Shard(0), Replicate(), Shard(1)),
        (lambda x, w: x.sum(0), Shard(0), Replicate(), Partial()),
        (lambda x, w: x.sum(1), Shard(0), Replicate(), Shard(0)),
        (lambda x, w: x.softmax(1), Shard(1), Replicate(), Replicate()),
        (lambda x, w: x.view(2, 2, 3), Shard(1), Replicate(), Shard(2)),
        (lambda x, w: x.view(12), Shard(0), Replicate(), Shard(0)),
        (lambda x, w: x.view(12), Shard(1), Replicate(), Replicate()),
        (lambda x, w: x.unsqueeze(0), Shard(1), Replicate(), Shard(2)),
        (lambda x, w: x + 1, Shard(1), Replicate(), Shard(1)),
        (lambda x, w: x.cumsum(0), Shard(0), Replicate(), Replicate()),
    ],
)
def test_ops_treat_them_as_on_larger_axes(mesh, run, x, w, want):
    a = sw.distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), x])
    b = sw.distribute_tensor(torch.ones(3, 6), mesh, [Replicate(), w])
    out = run(a, b)
    assert out.placements == (Replicate(), want)
    assert Layout.of(out.shape, out.sharding.axes, out.placements) is out.sharding


def test_gradients_have_the_placements_of_their_parameters(mesh):
    x = sw.distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Replicate()])
    columns = sw.distribute_tensor(torch.randn(8, 6), mesh, [Replicate(), Shard(0)]).requires_grad_()
    rows = sw.distribute_tensor(torch.randn(6, 8), mesh, [Replicate(), Shard(1)]).requires_grad_()
    torch.nn.functional.linear(torch.nn.functional.linear(x, columns).relu(), rows).pow(2).sum().backward()
    assert [p.grad.placements[1] for p in (columns, rows)] == [Shard(0), Shard(1)]
    y = sw.distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]).requires_grad_()
    y.redistribute(placements=[Replicate(), Partial()]).to_local().sum().backward()
    assert y.grad.placements == (Shard(0), Shard(0))
    y.grad = None
    y.to_local().sum().backward()
    assert y.grad.placements == (Shard(0), Shard(0))


def test_nothing_is_planned_for_them(mesh):
    x = sw.distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Shard(1)])
    y = sw.distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Partial()])
    with sw.policy(implicit="error"):
        assert (x + y).placements == (Shard(0), Shard(1))
    assert x.sharding is y.sharding


def test_a_pickled_tensor_keeps_them():
    with sw.simulate(1):
        mesh = sw.init_device_mesh("cpu", (1,))
        x = sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        spec = x._spec
        kind, args = spec.__reduce__()
        assert kind(*args) is spec
        assert spec.placements == (Shard(0),)
