"""parallelize_module with plans of strings and of styles against the dense module."""

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, PlanError, RowwiseParallel, parallelize_module


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()


def test_an_mlp_by_names_takes_one_all_reduce_each_way():
    dense, x = mlp(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    want = dense(x)
    want.square().sum().backward()
    wanted, x.grad = x.grad, None
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        m = parallelize_module(copy.deepcopy(dense), mesh, {"0": "colwise", "2": "rowwise"})
        with CommDebugMode() as forward:
            got = m(x)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        with CommDebugMode() as backward:
            got.square().sum().backward()
        assert (forward.get_total_counts(), backward.get_total_counts()) == (1, 1)
        assert type(x.grad) is torch.Tensor
        torch.testing.assert_close(x.grad, wanted, rtol=1e-9, atol=1e-9)
        for p, q in zip(m.parameters(), copy.deepcopy(dense).parameters(), strict=True):
            assert p.grad.sharding is p.sharding
            assert p.shape == q.shape


def test_a_key_that_matches_nothing_lists_near_misses_and_changes_nothing():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(PlanError, match="2 problems") as error:
            parallelize_module(m, mesh, {"model.0": "colwise", "1": "colwse"})
        assert "'model.0' matches no module or parameter; near misses: 0" in str(error.value)
        assert "unknown style 'colwse'; did you mean colwise" in str(error.value)
        assert not any(isinstance(p, sw.DTensor) for p in m.parameters())


def test_styles_pass_blocks_between_modules():
    dense, x = mlp(), torch.randn(3, 6, dtype=torch.float64)
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        m = parallelize_module(copy.deepcopy(dense), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for got in m(x).ranks:
            torch.testing.assert_close(got, dense(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "change",
    [sw.materialize, lambda m: m.to_empty(device="cpu"), lambda m: m.double(), copy.deepcopy, lambda m: m],
    ids=["materialize", "to_empty", "double", "deepcopy", "nothing"],
)
def test_gradients_wait_for_the_step_however_parameters_were_replaced(change):
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        device = "meta" if change is sw.materialize else "cpu"
        model = nn.Sequential(nn.Linear(4, 6, device=device), nn.Linear(6, 4, device=device))
        parallelize_module(model, mesh, {"0": "colwise", "1": "rowwise"})
        model = change(model)
        model = change(model)
        dtype = model[0].weight.dtype
        x = sw.distribute_tensor(torch.randn(6, 4, dtype=dtype), mesh, [sw.Shard(0), sw.Replicate()])
        for _ in range(2):
            with CommDebugMode() as comm:
                model(x).sum().backward()
            assert comm.get_total_counts() == 1  # of the product, not of a gradient
        torch.optim.SGD(model.parameters()).step()
        for p in model.parameters():
            assert p.grad.sharding is p.sharding


class Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int = 4) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v = (nn.Linear(6, heads * head_dim) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, 6)

    def forward(self, x):
        q, k, v = (
            p(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads", [3, 4, 5])
def test_attention_takes_one_all_reduce_each_way_with_any_number_of_heads(heads):
    torch.manual_seed(0)
    dense, x = nn.Sequential(Attention(heads)).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    dense(x).square().sum().backward()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        m = parallelize_module(copy.deepcopy(dense), mesh, {"0.[qkv]": "colwise", "0.o": "rowwise"})
        m.zero_grad()
        given = sw.distribute_tensor(x, mesh).requires_grad_()
        with CommDebugMode() as comm:
            out = m(given)
            out.square().sum().backward()
        assert comm.get_total_counts() == 2
        for (name, p), q in zip(m.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().ranks[0], q.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_copies_and_unfrozen_parameters_train_as_the_original():
    dense, x = mlp(), torch.randn(3, 6, dtype=torch.float64)
    dense(x).square().sum().backward()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        frozen = copy.deepcopy(dense).requires_grad_(False)
        frozen.zero_grad()
        m = parallelize_module(frozen, mesh, {"0": "colwise", "2": "rowwise"})
        for model in (copy.deepcopy(m).requires_grad_(), m.requires_grad_()):
            model(x).square().sum().backward()
            for p, q in zip(model.parameters(), dense.parameters(), strict=True):
                assert p.grad.sharding is p.sharding
                torch.testing.assert_close(p.grad.full_tensor().ranks[0], q.grad, rtol=1e-9, atol=1e-9)
