"""Tensors of each rank beside DTensors, without autograd: as plain tensors beside DTensors on real processes."""

import torch
from torch import nn

import shardwise as sw


def test_clipping_parameters_of_both_kinds():
    dense = [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(4))]
    for p in dense:
        p.grad = p.detach() * 2 + 1
    want = nn.utils.clip_grad_norm_(dense, 0.5)
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        split = nn.Parameter(sw.distribute_tensor(dense[0].detach(), mesh, [sw.Shard(0)]))
        split.grad = split.detach() * 2 + 1
        plain = sw.per_rank(lambda rank: dense[1].detach().clone().requires_grad_())
        plain.grad = sw.per_rank(lambda rank: torch.full((4,), 3.0))
        norm = nn.utils.clip_grad_norm_([split, plain], 0.5)
        assert all(torch.allclose(n, want) for n in norm.full_tensor().ranks)
        assert torch.allclose(split.grad.full_tensor().ranks[0], dense[0].grad)
        assert all(torch.allclose(g, dense[1].grad) for g in plain.grad.ranks)


def test_a_number_of_each_rank_is_an_operand():
    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
        with torch.no_grad():
            y = x * sw.per_rank(lambda rank: torch.tensor(2.0))
            z = torch.stack([sw.per_rank(lambda rank: torch.tensor(2.0)), x.sum()])
        assert torch.equal(y.full_tensor().ranks[1], torch.arange(5.0) * 2)
        assert torch.equal(z.full_tensor().ranks[2], torch.tensor([2.0, 10.0]))
