"""Tensors created like others: in the same layout, without communication, whatever is pending.

Memory that a program asks for stays pending, as in torch; values are written by each rank, so nothing of them is pending.
"""

import pytest
import torch

import shardwise as sw
from shardwise.comm import counting

LIKE = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 2.5),
    "empty_like": lambda x: torch.empty_like(x).fill_(3),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones": lambda x: x.new_ones(x.shape),
    "new_full": lambda x: x.new_full(x.shape, 7.0, dtype=torch.float64),
    "new_empty": lambda x: x.new_empty(x.shape).fill_(1),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, (1, 5)).fill_(1),
}


@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize(
    "placement", [sw.Shard(0), sw.Shard(1), sw.Partial(), sw.Partial("max"), sw.Replicate()]
)
def test_a_tensor_created_like_another_has_its_layout(name, placement):
    fn = LIKE[name]
    want = fn(torch.ones(5, 6))
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.ones(5, 6), mesh, [placement])
        with counting() as ledger:
            y = fn(x)
        assert ledger.collectives == 0
        is_memory = "empty" in name
        assert y.placements == ((placement,) if placement.is_shard() or is_memory else (sw.Replicate(),))
        assert y.stride() == want.stride()
        for rank in y.full_tensor().ranks:
            torch.testing.assert_close(rank, want)


def test_memory_of_another_dtype_and_random_values_are_not_pending():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.ones(5, 6), mesh, [sw.Partial()])
        others = (
            x.new_empty(x.shape, dtype=torch.bool),
            torch.empty_like(x, dtype=torch.bool),
            torch.rand_like(x),
            torch.bernoulli(x, 0.5),
        )
        for y in others:
            assert y.placements == (sw.Replicate(),)
        with counting() as ledger:
            assert torch.dropout(x, 0.5, True).placements == (sw.Partial(),)
        assert ledger.collectives == 0


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Partial()])
def test_a_tensor_of_another_shape_is_replicated(placement):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = sw.distribute_tensor(torch.ones(5, 6), mesh, [placement])
        with counting() as ledger:
            created = [x.new_zeros(3), x.new_ones((2, 5)), x.new_full((4, 4), 2), x.new_empty((0, 6))]
        assert ledger.collectives == 0
        assert [str(y.sharding) for y in created] == ["[3]", "[2, 5]", "[4, 4]", "[0, 6]"]
        assert created[2].full_tensor().ranks[3].unique().item() == 2


def test_to_empty_keeps_pending_reductions():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        module = torch.nn.Module()
        module.register_buffer(
            "total", sw.DTensor.from_local(torch.tensor(0.0, device="meta"), mesh, [sw.Partial()])
        )
        assert module.to_empty(device="cpu").total.placements == (sw.Partial(),)
        assert module.to_empty(device=None).total.placements == (sw.Partial(),)
