"""Strides of results of ops on tensors without elements."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw

OPS = {
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1, 0),
    "sort": lambda t: t.sort(0)[0],
    "nan_to_num": torch.nan_to_num,
    "add": lambda t: t + 1,
    "clone": torch.clone,
    "cat": lambda t: torch.cat([t, t]),
    "cumsum": lambda t: t.cumsum(0),
    "where": lambda t: torch.where(t > 0, t, t),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "stride"), [((0,), (2,)), ((0, 3), (7, 2)), ((3, 0), (1, 5)), ((2, 0, 3), (9, 4, 1))]
)
def test_strides_are_those_of_the_kernel(op, shape, stride):
    base = torch.zeros(40)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(base, mesh, [sw.Replicate()]).as_strided(shape, stride)
        found, expected = OPS[op](x), OPS[op](base.as_strided(shape, stride))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
