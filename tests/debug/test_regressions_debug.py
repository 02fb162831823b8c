"""What users of other libraries reported of silent errors, by the numbers of the list of regressions: 131 and 132."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import DivergenceError
from shardwise.parallel import fully_shard, parallelize_module

BAD = 2


def line(size=4, name="cp"):
    return sw.init_device_mesh("cpu", (size,), mesh_dim_names=(name,))


def whole(x):
    full = x.full_tensor() if isinstance(x, sw.DTensor) else x
    return full.ranks[-1] if isinstance(full, sw.PerRank) else full


def compare(program, *inputs, placements, seed=None):
    """Compare the result and the gradients of a program on 4 ranks with those on one device."""

    def run(make):
        leaves = [make(x.clone(), p).requires_grad_() for x, p in zip(inputs, placements, strict=True)]
        if seed is not None:
            sw.manual_seed(seed)
        out = program(*leaves)
        out.backward()
        return [whole(out).detach(), *(whole(x.grad) for x in leaves)]

    with sw.one_device():
        expected = run(lambda x, _: x)
    with sw.simulate(4):
        mesh = line()
        found = run(lambda x, p: sw.distribute_tensor(x, mesh, [p]))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def numbers(*shape):
    return (torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64) ** 1.3).sin().view(shape)


@pytest.mark.parametrize("split", [Shard(2), Replicate()], ids=str)
@pytest.mark.parametrize("length", [8, 10])
def test_r131_masks_at_the_borders_of_a_split_sequence_and_gradients_of_attention(length, split):
    q, k, v = numbers(1, 2, length, 4), numbers(1, 2, length, 4) + 0.1, numbers(1, 2, length, 4) - 0.2

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum()

    compare(attention, q, k, v, placements=[Shard(2), split, split])


def test_r131_reductions_are_neither_missing_nor_doubled():
    def program(x, w):
        y = x @ w  # a pending sum where the contraction is split
        return (y + y.detach()).pow(2).mean() + w.sum()

    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        compare(program, numbers(6, 8), numbers(8, 5), placements=placements)
    with sw.simulate(4):
        terms = sw.DTensor.from_local(sw.per_rank(lambda r: torch.tensor(float(r))), line(), [Partial()])
        assert whole(terms + 1).item() == 7.0  # the number is added once


def test_r131_the_scale_of_a_mean_over_unequal_parts():
    def program(x, w):
        target = (x.detach()[:, 0] > 0).long()
        return F.cross_entropy(x @ w, target, reduction="mean", label_smoothing=0.1)

    compare(program, numbers(10, 4), numbers(4, 3), placements=[Shard(0), Replicate()])


def test_r131_recomputation_draws_the_same_numbers_and_sees_the_same_weights():
    def layer(x, w):
        return F.dropout(torch.tanh(x @ w), 0.4)

    def program(x, w):
        return checkpoint(layer, checkpoint(layer, x, w, use_reentrant=False), w, use_reentrant=False).sum()

    compare(program, numbers(8, 5), numbers(5, 5), placements=[Shard(0), Replicate()], seed=5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 12, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_r131_the_gradient_of_tied_weights(plan):
    tokens = torch.arange(8) % 12

    def build():
        torch.manual_seed(0)
        return Tied()

    dense = build()
    F.cross_entropy(dense(tokens), tokens.flip(0)).backward()
    with sw.simulate(4):
        net, mesh = build(), line(name=plan)
        if plan == "tp":
            parallelize_module(net, mesh, {"embed": "rowwise", "head": "colwise"})
        else:
            fully_shard(net, mesh=mesh)
        split = [Shard(0) if plan == "fsdp" else Replicate()]
        x, y = (sw.distribute_tensor(t, mesh, split) for t in (tokens, tokens.flip(0)))
        F.cross_entropy(net(x), y).backward()
        assert net.head.weight is net.embed.weight
        torch.testing.assert_close(whole(net.embed.weight.grad), dense.embed.weight.grad)


def is_bad():
    return dist.get_rank() == BAD


def training(clip=lambda: True, parameters=lambda p: p, autocast=lambda: True, drift=lambda: False):
    """A step of replicas in which one thing can be wrong on one rank."""
    mesh = line(name="dp")
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    weights = [
        nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [Replicate()])) for p in layer.parameters()
    ]
    optimizer = torch.optim.SGD(parameters(weights), lr=0.1)
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [Replicate()])  # nothing is sent: nobody would wait
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast()):
            loss = F.linear(x, *weights).pow(2).mean()
        loss.backward()
        if clip():
            nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if drift():
            weights[0].to_local().detach().mul_(1.0001)


WRONG = {
    "weights of replicas drift": (lambda: training(drift=is_bad), "values"),
    "clipping is not applied": (lambda: training(clip=lambda: not is_bad()), "order"),
    "the optimizer misses parameters": (
        lambda: training(parameters=lambda p: p[: 1 if is_bad() else 2]),
        "order",
    ),
    "autocast is dropped": (lambda: training(autocast=lambda: not is_bad()), "order"),
}


def sanitized(name):
    try:
        with sw.sanitize():
            WRONG[name][0]() if name else training()
    except DivergenceError as error:
        return error.kind, str(error)
    return "", ""


@pytest.mark.processes
def test_r132_what_goes_wrong_silently_is_found():
    found = sw.launch(lambda: [sanitized(name) for name in ("", *WRONG)], 4, timeout=120)
    assert all(of_rank == found[0] for of_rank in found)
    (kind, _), *others = found[0]
    assert kind == ""
    for (name, (_, expected)), (kind, text) in zip(WRONG.items(), others, strict=True):
        assert kind == expected, f"{name}: {text}"
        assert f"rank {BAD}: " in text, name
        assert "test_regressions_debug.py:" in text, name
