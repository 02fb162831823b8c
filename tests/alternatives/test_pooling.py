"""Pooling over split positions by halo exchange: values, indices and gradients equal the dense ones."""

import random

import pytest
import torch
from tests.alternatives.test_rearrange import distribute_like
from torch.nn import functional

import shardwise as sw
from shardwise.alternatives import pooling
from shardwise.comm import counting

POOLS = {
    "max 1d": (1, lambda x, kw: functional.max_pool1d(x, return_indices=True, **kw)),
    "max 2d": (2, lambda x, kw: functional.max_pool2d(x, return_indices=True, **kw)),
    "max 3d": (3, lambda x, kw: functional.max_pool3d(x, return_indices=True, **kw)),
    "avg 1d": (1, lambda x, kw: (functional.avg_pool1d(x, **kw),)),
    "avg 2d": (2, lambda x, kw: (functional.avg_pool2d(x, **kw),)),
    "avg 3d": (3, lambda x, kw: (functional.avg_pool3d(x, **kw),)),
}


def random_pool(draw, name):
    """A pool with random numbers whose result is not empty: its input, its arguments and its result."""
    nd, pool = POOLS[name]
    while True:
        kernel = [draw.randint(1, 4) for _ in range(nd)]
        kwargs = {
            "kernel_size": kernel,
            "stride": draw.choice([None, [draw.randint(1, 3) for _ in range(nd)]]),
            "padding": [draw.randint(0, k // 2) for k in kernel],
            "ceil_mode": draw.random() < 0.5,
        }
        if "max" in name:
            kwargs["dilation"] = draw.randint(1, 2)
        else:
            kwargs["count_include_pad"] = draw.random() < 0.5
            if nd > 1 and draw.random() < 0.3:
                kwargs["divisor_override"] = 5
        x = torch.randn(3, 2, *(draw.randint(3, 9) for _ in range(nd)), dtype=torch.float64)
        if "max" in name and draw.random() < 0.5:
            x = x.where(x > 0.5, -float("inf"))  # entire windows of -inf have an index too
        x.requires_grad_()
        try:
            out = pool(x, kwargs)
        except RuntimeError:
            continue
        if 0 not in out[0].shape:
            return x, kwargs, out


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", POOLS)
def test_result_and_gradient_equal_the_dense_ones(name, taken):
    nd, pool = POOLS[name]
    draw = random.Random(name)
    for turn in range(16):
        x, kwargs, want = random_pool(draw, name)
        weights = torch.randn_like(want[0])
        finite = want[0].isfinite()
        (want[0].where(finite, 0) * weights).sum().backward()
        d = draw.randrange(nd) + 2
        shape, placements = draw.choice([
            ((4,), [sw.Shard(d)]),
            ((2, 2), [sw.Shard(d), sw.Shard(d)]),
            ((2, 2), [sw.Shard(d), sw.Shard(0)]),
            ((2, 2), [sw.Shard(1), sw.Shard(d)]),
            ((2, 2), [sw.Shard(2), sw.Shard(nd + 1)]),
            ((2, 2), [sw.Shard(d), sw.Replicate()]),
        ])  # fmt: skip
        taken.clear()
        with sw.simulate(4):
            mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
            y = sw.distribute_tensor(x.detach(), mesh, placements).requires_grad_()
            got = pool(y, kwargs)
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g.full_tensor().ranks[1], w, msg=f"{turn} {kwargs} {placements}")
            mask = sw.distribute_tensor(finite, mesh, [sw.Replicate()] * len(shape))
            ours = got[0].where(mask, 0)
            (ours * distribute_like(weights, got[0], mesh)).sum().backward()
            torch.testing.assert_close(y.grad.full_tensor().ranks[3], x.grad)
        assert len(set(taken) & pooling.ALTERNATIVES.keys()) >= 2, (turn, placements)


def test_a_pending_sum_stays_pending_in_an_average():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        y = sw.distribute_tensor(x, mesh, [sw.Shard(2), sw.Partial()])
        got = functional.avg_pool2d(y, 3, 1, 1)
        assert str(got.sharding) == "[2, 3, 8:dp, 8] P(tp,sum)"
        torch.testing.assert_close(got.full_tensor().ranks[0], functional.avg_pool2d(x, 3, 1, 1))


def test_windows_inside_blocks_send_nothing_and_others_one_row():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.randn(2, 3, 32, 16), mesh, [sw.Shard(2)]).requires_grad_()
        with sw.policy(implicit="error"):
            y = functional.max_pool2d(x, 2)
            assert str(y.sharding) == "[2, 3, 16:tp, 8]"
            (grad,) = torch.autograd.grad(y, x, y.detach())
            assert str(grad.sharding) == "[2, 3, 32:tp, 16]"
        with counting() as ledger:
            functional.avg_pool2d(x, 3, 1, 1)
        assert ledger.bytes == 6 * 4 * 2 * 3 * 16  # one row over each of three borders, in both directions


def program():
    """Pooling on real ranks."""
    torch.manual_seed(0)
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = sw.distribute_tensor(torch.randn(2, 3, 9, 7), mesh, [sw.Shard(2), sw.Shard(3)]).requires_grad_()
    y, at = functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    z = functional.avg_pool2d(y, 3, 1, 1, count_include_pad=False)
    z.cos().sum().backward()
    return [t.detach().full_tensor() for t in (z, at, x.grad)]


@pytest.mark.processes
def test_the_dense_result_on_real_processes(workers):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7).requires_grad_()
    y, at = functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    z = functional.avg_pool2d(y, 3, 1, 1, count_include_pad=False)
    z.cos().sum().backward()
    for got in workers.run(program):
        for g, want in zip(got, (z.detach(), at, x.grad), strict=True):
            torch.testing.assert_close(g, want)
