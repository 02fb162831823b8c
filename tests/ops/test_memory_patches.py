"""Ops that look at a tensor's memory: `fill_diagonal_` on views, and `resolve_conj` as a copy."""

import pytest
import torch
from tests.dense import randn

import shardwise as sw


@pytest.fixture
def mesh():
    with sw.simulate(2):
        yield sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1)])
@pytest.mark.parametrize("shape", [(3, 3), (9, 2), (2, 5), (3, 3, 3), (1, 4), (0, 3)])
@pytest.mark.parametrize("wrap", [False, True])
def test_fill_diagonal(mesh, shape, wrap, placement):
    want = randn(*shape)
    x = sw.distribute_tensor(want, mesh, [placement])
    want.fill_diagonal_(-1, wrap)
    assert x.fill_diagonal_(-1, wrap) is x
    assert torch.equal(x.full_tensor().ranks[0], want)


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1)])
def test_fill_diagonal_of_a_view_writes_to_its_base(mesh, placement):
    want = randn(3, 6)
    x = sw.distribute_tensor(want, mesh, [placement])
    want[:, 1:].fill_diagonal_(0)
    x[:, 1:].fill_diagonal_(0)
    assert torch.equal(x.full_tensor().ranks[0], want)


def test_fill_diagonal_of_a_vector_is_torchs_error(mesh):
    with pytest.raises(RuntimeError, match="larger than 1"):
        sw.distribute_tensor(randn(3), mesh, [sw.Shard(0)]).fill_diagonal_(1)


def test_a_resolved_conjugate_is_a_copy(mesh):
    x = sw.distribute_tensor(randn(4, dtype=torch.complex128), mesh, [sw.Shard(0)])
    before = x.full_tensor().ranks[0].clone()
    x.conj().resolve_conj().zero_()
    assert torch.equal(x.full_tensor().ranks[0], before)
    x.conj().conj().resolve_conj().zero_()  # not conjugate: the tensor itself
    assert not x.full_tensor().ranks[0].any()
