"""Ops on tensors of a mesh and of a sub-mesh of it: allowed where the result is unambiguous."""

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
@pytest.mark.parametrize("on_submesh", [Shard(0), Shard(1), Replicate()])
def test_a_tensor_replicated_along_the_other_axes_moves_to_the_sub_mesh(root, on_tp, on_submesh):
    x = sw.distribute_tensor(W, root, [Replicate(), on_tp])
    y = sw.distribute_tensor(W + 1, root["tp"], [on_submesh])
    for got, want in ((x + y, W + W + 1), (y * x, (W + 1) * W), (torch.cat([x, y]), torch.cat([W, W + 1]))):
        assert got.device_mesh == root["tp"]
        assert all(torch.equal(b, want) for b in got.full_tensor().ranks)


def test_each_copy_of_the_sub_mesh_keeps_its_own_values(root):
    blocks = sw.per_rank(lambda rank: torch.full((2,), float(rank // 3)))
    y = sw.DTensor.from_local(blocks, root["tp"], [Replicate()])  # different values along dp
    x = sw.distribute_tensor(torch.tensor([1.0, 2.0]), root)
    assert [b.tolist() for b in (x + y).to_local().ranks] == [[1, 2]] * 3 + [[2, 3]] * 3


def test_ambiguous_combinations_are_errors(root):
    y = sw.distribute_tensor(W, root["tp"], [Shard(0)])
    split = sw.distribute_tensor(W, root, [Shard(0), Replicate()])
    other_axis = sw.distribute_tensor(W, root["dp"], [Shard(0)])
    replicated = sw.distribute_tensor(W, root)
    for call in (
        lambda: split + y,  # it differs along dp
        lambda: other_axis + y,  # neither mesh contains the other
        lambda: replicated.clone().add_(y),  # it would differ along dp afterwards
        lambda: replicated.clone().requires_grad_() * y,  # its gradient would have to be summed along dp
    ):
        with pytest.raises(MeshError, match="joins a sub-mesh if it is replicated"):
            call()


@pytest.mark.parametrize("on_tp", [Shard(1), Replicate(), Partial()])
def test_a_tensor_on_a_sub_mesh_joins_the_larger_mesh_where_plain_tensors_count_as_replicated(root, on_tp):
    """The buffers of a tensor-parallel module whose data are split over another axis as well; gradients too."""
    y = sw.distribute_tensor(W + 1, root["tp"], [on_tp])
    x = sw.distribute_tensor(W, root, [Shard(0), Shard(1)]).requires_grad_()
    replicated = sw.distribute_tensor(W, root, [Replicate(), Shard(0)]).requires_grad_()
    dense = W.clone().requires_grad_()
    for given in (x, replicated):
        with sw.policy(plain="check"):
            out = (given * y).exp() + y
        assert out.device_mesh == root
        (wanted,) = torch.autograd.grad(want := ((dense * (W + 1)) / 100).exp().sum() + (W + 1).sum(), dense)
        with sw.policy(plain="replicate"):
            got = (given * y / 100).exp().sum() + y.sum()
        assert torch.allclose(got.full_tensor().ranks[0], want)
        (grad,) = torch.autograd.grad(got, given)
        assert torch.allclose(grad.full_tensor().ranks[0], wanted)
        with pytest.raises(MeshError, match="where plain tensors count as replicated"):
            given * y


def test_a_tensor_on_a_sub_mesh_that_joins_is_compared_and_is_neither_written_to_nor_trained(root):
    x = sw.distribute_tensor(W, root, [Shard(0), Replicate()])
    y = sw.distribute_tensor(W, root["tp"], [Shard(0)])
    blocks = sw.per_rank(lambda rank: W + rank // 3)
    differs = sw.DTensor.from_local(blocks, root["tp"], [Replicate()])
    with sw.policy(plain="check"):
        with pytest.raises(sw.LayoutError, match="differs from the one at"):
            x * differs
        for call in (lambda: y.clone().add_(x), lambda: x * y.clone().requires_grad_()):
            with pytest.raises(MeshError, match="is not written to and needs no gradient"):
                call()
