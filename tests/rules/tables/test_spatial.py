"""Image ops with split batch or channels, or with a pending sum: forward and backward against the dense result."""

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise.call.trace import trace_calls
from shardwise.comm import counting


def resize(mode, size, **kwargs):
    return lambda x: functional.interpolate(x, size, mode=mode, **kwargs)


OPS = {
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x, (3, 2)),
    "nearest": resize("nearest", (9, 3)),
    "nearest-exact": resize("nearest-exact", (9, 3)),
    "bilinear": resize("bilinear", (9, 3)),
    "bilinear antialias": resize("bilinear", (3, 3), antialias=True),
    "bicubic": resize("bicubic", (9, 3)),
    "bicubic antialias": resize("bicubic", (3, 3), antialias=True),
    "reflect": lambda x: functional.pad(x, (1, 2, 2, 1), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 2, 2, 1), mode="replicate"),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: functional.channel_shuffle(x, 2),
    "unfold": lambda x: functional.unfold(x, 2, padding=1),
    "fold": lambda x: functional.fold(x.flatten(2).reshape(5, 4, 36), 7, 2, padding=0),
}
VOLUMES = {
    "max_pool3d": lambda x: functional.max_pool3d(x, 2),
    "avg_pool3d": lambda x: functional.avg_pool3d(x, 2),
    "adaptive_avg_pool3d": lambda x: functional.adaptive_avg_pool3d(x, 2),
    "adaptive_max_pool3d": lambda x: functional.adaptive_max_pool3d(x, 2),
    "nearest": resize("nearest", (3, 5, 2)),
    "nearest-exact": resize("nearest-exact", (3, 5, 2)),
    "trilinear": resize("trilinear", (3, 5, 2)),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
}
LINES = {
    "nearest": resize("nearest", 9),
    "nearest-exact": resize("nearest-exact", 9),
    "linear": resize("linear", 9),
    "reflect": lambda x: functional.pad(x, (1, 2), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 2), mode="replicate"),
}
CASES = {
    **{f"{name} 2d": (op, (5, 4, 6, 6)) for name, op in OPS.items()},
    **{f"{name} 3d": (op, (5, 4, 4, 4, 4)) for name, op in VOLUMES.items()},
    **{f"{name} 1d": (op, (5, 4, 6)) for name, op in LINES.items()},
}
# ops whose channels must not be split
MIXES_CHANNELS = {"pixel_shuffle 2d", "pixel_unshuffle 2d", "channel_shuffle 2d", "unfold 2d", "fold 2d"}


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Partial()])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_dense_ones(name, placement):
    op, shape = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    want = op(x)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        y = sw.distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        w = sw.distribute_tensor(weights, mesh, [sw.Replicate()])
        routes = []
        with counting() as ledger, trace_calls(lambda call: routes.append(call.route)):
            got = op(y)
        is_free = not (
            (placement == sw.Shard(1) and name in MIXES_CHANNELS)
            or (placement == sw.Partial() and "max" in name)
        )
        assert (ledger.bytes == 0) == is_free
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        with trace_calls(lambda call: routes.append(call.route)):
            (got * w).sum().backward()
        torch.testing.assert_close(y.grad.full_tensor().ranks[0], x.grad)
    assert routes
    assert "fallback" not in routes


@pytest.mark.parametrize("split", [(0, 0), (1, None), (None, 1), (None, 2)])
@pytest.mark.parametrize("nd", [2, 3])
def test_grid_sample(nd, split):
    torch.manual_seed(0)
    x = torch.randn(4, 4, *[5] * nd, dtype=torch.float64, requires_grad=True)
    grid = (2 * torch.rand(4, *[4] * nd, nd, dtype=torch.float64) - 1).requires_grad_()
    want = functional.grid_sample(x, grid, align_corners=False)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        xs = [
            sw.distribute_tensor(
                t.detach(), mesh, [sw.Replicate() if d is None else sw.Shard(d)]
            ).requires_grad_()
            for t, d in zip((x, grid), split, strict=True)
        ]
        w = sw.distribute_tensor(weights, mesh, [sw.Replicate()])
        routes = []
        with trace_calls(lambda call: routes.append(call.route)):
            with counting() as ledger:
                got = functional.grid_sample(*xs, align_corners=False)
            (got * w).sum().backward()
        assert ledger.bytes == 0
        torch.testing.assert_close(got.full_tensor().ranks[1], want)
        for ours, t in zip(xs, (x, grid), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor().ranks[0], t.grad)
    assert routes
    assert "fallback" not in routes


@pytest.mark.parametrize("size", [(5, 1, 4, 3), (5, 1, 2, 4, 3)])
def test_affine_grid(size):
    nd = len(size) - 2
    theta = torch.randn(5, nd, nd + 1, dtype=torch.float64)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(theta, mesh, [sw.Shard(0)])
        with sw.policy(implicit="error"):
            got = functional.affine_grid(x, list(size), align_corners=False)
        torch.testing.assert_close(
            got.full_tensor().ranks[1], functional.affine_grid(theta, list(size), align_corners=False)
        )
