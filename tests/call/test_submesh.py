"""Tensors on a mesh and on a part of it: one op where there is no doubt, else an error."""

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.tensor.errors import MeshError

W = torch.arange(12.0).view(3, 4)


@pytest.fixture
def root():
    with sw.simulate(6):
        yield sw.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("on_tp", [Shard(0), Shard(1), Replicate(), Partial()])
@pytest.mark.parametrize("on_part", [Shard(0), Shard(1), Replicate()])
def test_what_is_the_same_along_the_rest_comes_in(root, on_tp, on_part):
    x = sw.distribute_tensor(W, root, [Replicate(), on_tp])
    y = sw.distribute_tensor(W + 1, root["tp"], [on_part])
    for got, want in ((x + y, W + W + 1), (y * x, (W + 1) * W), (torch.cat([x, y]), torch.cat([W, W + 1]))):
        assert got.device_mesh == root["tp"]
        assert all(torch.equal(b, want) for b in got.full_tensor().ranks)


def test_each_place_of_the_part_has_its_own(root):
    mine = sw.per_rank(lambda rank: torch.full((2,), float(rank // 3)))
    y = sw.DTensor.from_local(mine, root["tp"], [Replicate()])  # another value for each place on dp
    x = sw.distribute_tensor(torch.tensor([1.0, 2.0]), root)
    assert [b.tolist() for b in (x + y).to_local().ranks] == [[1, 2]] * 3 + [[2, 3]] * 3


def test_where_there_is_doubt_it_is_an_error(root):
    y = sw.distribute_tensor(W, root["tp"], [Shard(0)])
    split = sw.distribute_tensor(W, root, [Shard(0), Replicate()])
    elsewhere = sw.distribute_tensor(W, root["dp"], [Shard(0)])
    whole = sw.distribute_tensor(W, root)
    for call in (
        lambda: split + y,  # along dp it is not the same
        lambda: elsewhere + y,  # neither is a part of the other
        lambda: whole.clone().add_(y),  # it would no longer be the same along dp
        lambda: whole.clone().requires_grad_() * y,  # whose gradient is to be added up along dp
    ):
        with pytest.raises(MeshError, match="sub-mesh of it"):
            call()
