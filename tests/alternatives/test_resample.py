"""Nearest-neighbor resampling, and reflection or replication padding, over split positions: dense results."""

import random

import pytest
import torch
from tests.alternatives.test_rearrange import distribute_like
from torch.nn import functional

import shardwise as sw
from shardwise.alternatives import resample
from shardwise.comm import counting


def resize(mode):
    def run(draw, x):
        nd = x.dim() - 2
        if draw.random() < 0.5:
            kwargs = {"scale_factor": [draw.choice([2.0, 0.7, 1.4]) for _ in range(nd)]}
        else:
            kwargs = {"size": [draw.randint(1, 14) for _ in range(nd)]}
        return lambda x: functional.interpolate(x, mode=mode, **kwargs)

    return run


def padding(mode):
    def run(draw, x):
        most = min(x.shape[2:]) - 1
        pads = [draw.randint(0, most) for _ in range(2 * (x.dim() - 2))]
        return lambda x: functional.pad(x, pads, mode=mode)

    return run


OPS = {
    "nearest": resize("nearest"),
    "nearest-exact": resize("nearest-exact"),
    "reflect": padding("reflect"),
    "replicate": padding("replicate"),
}


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("nd", [1, 2, 3])
@pytest.mark.parametrize("name", OPS)
def test_result_and_gradient_equal_the_dense_ones(name, nd, taken):
    draw = random.Random(f"{name}{nd}")
    for _ in range(10):
        x = torch.randn(
            2, 2, *(draw.randint(3, 9) for _ in range(nd)), dtype=torch.float64, requires_grad=True
        )
        op = OPS[name](draw, x)
        want = op(x)
        weights = torch.randn_like(want)
        (want * weights).sum().backward()
        d = draw.randrange(nd) + 2
        shape, placements = draw.choice([
            ((4,), [sw.Shard(d)]),
            ((2, 2), [sw.Shard(d), sw.Shard(d)]),
            ((2, 2), [sw.Shard(2), sw.Shard(nd + 1)]),
            ((2, 2), [sw.Shard(d), sw.Partial()]),
        ])  # fmt: skip
        with sw.simulate(4):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            y = sw.distribute_tensor(x.detach(), mesh, placements).requires_grad_()
            got = op(y)
            torch.testing.assert_close(got.full_tensor().ranks[1], want)
            (got * distribute_like(weights, got, mesh)).sum().backward()
            torch.testing.assert_close(y.grad.full_tensor().ranks[3], x.grad)
    assert sum(op in resample.ALTERNATIVES for op in taken) >= 20


def test_blocks_twice_as_large_need_no_communication():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(2, 3, 32, 16), mesh, [sw.Shard(2)]).requires_grad_()
        with sw.policy(implicit="error"):
            y = functional.interpolate(x, scale_factor=2.0)
            assert str(y.sharding) == "[2, 3, 64:tp, 32]"
            (grad,) = torch.autograd.grad(y, x, y.detach())
            assert str(grad.sharding) == "[2, 3, 32:tp, 16]"
        with counting() as ledger:
            y = functional.pad(x, (1, 1, 1, 1), mode="reflect")
        assert str(y.sharding) == "[2, 3, 34:tp, 18]"
        gathered = 3 * 4 * 2 * 3 * 32 * 16
        assert 0 < ledger.bytes < gathered / 8
