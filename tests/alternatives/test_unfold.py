"""The gradient of `unfold` adds up windows, so that only pending sums and averages pass through it."""

import pytest
import torch
from tests.dense import randn
from tests.values import tensor

import shardwise as sw
from shardwise.comm import axes_of
from shardwise.layout import Layout


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("size", [3, 1])
def test_gradient_with_a_pending_reduction(op, size):
    grad = (randn(4, size, 2) * 8).round()
    want = torch.ops.aten.unfold_backward.default(grad, [5, size], 0, 2, 1)
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layout = Layout.of(grad.shape, axes_of(mesh), [sw.Partial(op), sw.Shard(0)])
        got = torch.ops.aten.unfold_backward.default(tensor(grad, layout, mesh), [5, size], 0, 2, 1)
        torch.testing.assert_close(got.full_tensor().ranks[0], want)
