"""Models, optimizers, schedules and the random stream go on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import json

import pytest
import torch
from tests.checkpoint.test_save_and_load import mesh_of, whole
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.parallel import fully_shard, parallelize_module, replicate


class Net(nn.Module):
    """A network with a tied, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.unused = nn.Linear(6, 3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.head(self.down(torch.tanh(self.up(self.embed(x)))))


def train(net, optimizer, schedule, steps, split):
    losses = []
    for step in range(steps):
        x = torch.arange(12).roll(step) % 7
        out = net(split(x))
        loss = nn.functional.cross_entropy(out, split(x.roll(1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return losses


def trainer(kind, ranks):
    torch.manual_seed(0)
    net = Net()
    net.up.bias.requires_grad_(False)
    split = lambda x: x  # noqa: E731
    if kind != "one":
        mesh = mesh_of((ranks,))
        if kind == "tp":
            parallelize_module(net, mesh, {"up": "colwise", "down": "rowwise"})
        else:
            {"fsdp": fully_shard, "replicate": replicate}[kind](net, mesh=mesh)
            split = lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)], src_data_rank=None)  # noqa: E731
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in net.named_parameters() if "embed" in n]},
            {"params": [p for n, p in net.named_parameters() if "embed" not in n], "lr": 0.02},
        ],
        lr=0.1,
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    return {"model": net, "optimizer": optimizer, "schedule": schedule}, split


def numbers(losses):
    return [float(whole(x)) for x in losses]


@pytest.mark.parametrize("target", ["one", "fsdp", "tp", "replicate"])
@pytest.mark.parametrize("source", ["one", "fsdp", "tp", "replicate"])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, source, target):
    with sw.simulate(1):
        state, split = trainer("one", 1)
        expected = numbers(train(*state.values(), 7, split))
    with sw.simulate(3):
        state, split = trainer(source, 3)
        first = numbers(train(*state.values(), 3, split))
        checkpoint.save(state, tmp_path / "c")
    names = json.loads((tmp_path / "c" / "checkpoint.json").read_text())["content"]
    assert names["aliases"] == {"model.head.weight": "model.embed.weight"}
    with sw.simulate(2):
        state, split = trainer(target, 2)
        if target == "fsdp":
            train(*state.values(), 1, split)  # it has a state already, which is replaced
        checkpoint.load(tmp_path / "c", into=state)
        kept = state["optimizer"].state
        assert len(kept) == sum(
            "unused" not in n and n != "up.bias" for n, _ in state["model"].named_parameters()
        )
        assert all(
            type(s["exp_avg"]) is (sw.DTensor if isinstance(p, sw.DTensor) else torch.Tensor)
            for p, s in kept.items()
        )
        assert state["model"].head.weight is state["model"].embed.weight
        rest = numbers(train(*state.values(), 4, split))
    assert first + rest == pytest.approx(expected, rel=1e-5)


def lbfgs(ranks, steps, path):
    """A parameter after so many steps of LBFGS, of which those before the checkpoint are not made again."""
    p = nn.Parameter(
        sw.distribute_tensor(torch.arange(6, dtype=torch.float64), mesh_of((ranks,)), [sw.Shard(0)])
    )
    optimizer = torch.optim.LBFGS([p], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (p.cos() + p * p).sum()
        loss.backward()
        return loss

    if path.exists():
        checkpoint.load(path, into={"p": p, "optimizer": optimizer})
    for _ in range(steps):
        optimizer.step(closure)
    checkpoint.save({"p": p, "optimizer": optimizer}, path)
    return whole(p.detach())


def test_the_state_of_lbfgs_that_is_pending_is_reduced(tmp_path):
    with sw.simulate(2):
        expected = lbfgs(2, 5, tmp_path / "whole")
        lbfgs(2, 3, tmp_path / "half")
    with sw.simulate(3):
        torch.testing.assert_close(lbfgs(3, 2, tmp_path / "half"), expected)


def test_the_state_of_parameters_that_are_frozen_later_is_kept(tmp_path):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    net.bias.requires_grad_(False)
    checkpoint.save({"m": net, "o": optimizer}, tmp_path / "c")
    other = nn.Linear(3, 2)
    other.bias.requires_grad_(False)
    again = torch.optim.Adam(other.parameters())
    checkpoint.load(tmp_path / "c", into={"m": other, "o": again})
    assert torch.equal(again.state[other.bias]["exp_avg"], optimizer.state[net.bias]["exp_avg"])


def test_names_do_not_depend_on_torch_compile(tmp_path):
    checkpoint.save({"m": torch.compile(nn.Linear(2, 2), backend="eager")}, tmp_path / "c")
    assert list(checkpoint.load(tmp_path / "c")["m"]) == ["weight", "bias"]


def test_the_random_stream_goes_on_where_it_was(tmp_path):
    with sw.simulate(4):
        sw.manual_seed(7)
        sw.rand(3)
        checkpoint.save({}, tmp_path / "c")
        expected = sw.rand(5)
    with sw.simulate(3):
        mesh = mesh_of((3,))
        sw.manual_seed(8)
        checkpoint.load(tmp_path / "c", into={})
        found = sw.rand(5, device_mesh=mesh, placements=[sw.Shard(0)])
        assert torch.equal(whole(found), expected)
        sw.manual_seed(8)
        checkpoint.load(tmp_path / "c", into={}, random=False)
        assert not torch.equal(sw.rand(5), expected)
