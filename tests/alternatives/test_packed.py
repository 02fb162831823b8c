"""Parts of a packed dim, `[2 n:tp]`: taking them apart and putting them together moves nothing."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import axes_of
from shardwise.debug import CommDebugMode
from shardwise.layout import parse_layout


@pytest.mark.parametrize(("ranks", "width"), [(2, 8), (3, 10), (4, 3)])
@pytest.mark.parametrize("take", ["chunk", "split", "slices"])
def test_parts_of_a_packed_projection_are_local(ranks: int, width: int, take: str):
    full = torch.randn(3, 3 * width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    take_parts = {
        "chunk": lambda x: x.chunk(3, -1),
        "split": lambda x: [
            *x.split([2 * width, width], -1)[0].chunk(2, -1),
            x.split([2 * width, width], -1)[1],
        ],
        "slices": lambda x: [x[:, :width], x[:, width : 2 * width], x[:, 2 * width :]],
    }[take]
    with sw.simulate(ranks):
        mesh = sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        layout, _ = parse_layout(f"[3, 3 {width}:tp]", axes_of(mesh))
        x = sw.distribute_tensor(full, mesh, layout.placements)
        with CommDebugMode() as comm:
            parts = take_parts(x)
        assert comm.get_total_counts() == 0
        for part, want in zip(parts, full.chunk(3, -1), strict=True):
            assert repr(part.sharding) == f"[3, {width}:tp]"
            assert torch.equal(part.full_tensor().ranks[-1], want)


def test_the_gradient_of_a_packed_projection_is_packed_and_moves_nothing():
    full = torch.randn(3, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dense = full.clone().requires_grad_()
    gate, up = dense.chunk(2, -1)
    (gate.sigmoid() * up).sum().backward()
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        layout, _ = parse_layout("[3, 2 7:tp]", axes_of(mesh))
        x = sw.distribute_tensor(full, mesh, layout.placements).requires_grad_()
        with CommDebugMode() as comm:
            gate, up = x.chunk(2, -1)
            out = gate.sigmoid() * up
            out.backward(torch.ones_like(out))
        assert comm.get_total_counts() == 0
        assert x.grad.sharding is layout
        torch.testing.assert_close(x.grad.full_tensor().ranks[1], dense.grad, rtol=1e-12, atol=1e-12)


def test_writes_to_parts_reach_the_whole_and_back():
    full = torch.arange(24.0).view(2, 12)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout, _ = parse_layout("[2, 2 6:tp]", axes_of(mesh))
        x = sw.distribute_tensor(full, mesh, layout.placements)
        second, (first, _) = x[:, 6:], x.chunk(2, -1)
        second.mul_(2)
        x.add_(1)
        first.zero_()
        want = full.clone()
        want[:, 6:] *= 2
        want += 1
        want[:, :6] = 0
        assert torch.equal(x.full_tensor().ranks[0], want)
        assert torch.equal(second.full_tensor().ranks[1], want[:, 6:])
