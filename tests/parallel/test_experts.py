"""Expert parallelism: tokens are routed and weights stay; values, gradients and bytes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise.comm import counting
from shardwise.fsdp import fully_shard
from shardwise.ops.pending_gradients import settle_gradients
from shardwise.parallel import parallelize_module

PLAN = {
    "experts.up": "grouped_gemm",
    "experts.bias": "grouped_gemm",
    "experts.down": "grouped_gemm",
    "experts": "ep_dispatch_experts",
}
WIDTH, HIDDEN = 6, 10


class Experts(nn.Module):
    """Experts with the signature of Hugging Face's, a bias for each, and a norm that they share."""

    def __init__(self, count: int, dropout: float) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(count, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 3)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            if len(token):
                h = F.silu(F.linear(x[token], self.up[expert], self.bias[expert]))
                h = self.dropout(self.norm(F.linear(h, self.down[expert])))
                out = out.index_add(0, token, h * weights[token, slot, None])
        return out


class MoE(nn.Module):
    """A router and experts, between two linear layers."""

    def __init__(self, count: int = 5, top: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.top = top
        self.first, self.router, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, count), nn.Linear(WIDTH, 3)
        self.experts = Experts(count, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        flat = x.flatten(0, -2)
        weights, index = self.router(flat).softmax(-1).topk(self.top)
        return self.last(x + self.experts(flat, index, weights).view_as(x))


def _full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


def _model(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MoE(**options).double(), torch.randn(4, 3, 4, dtype=torch.float64)


def _check(
    shape: tuple[int, ...], names: tuple[str, ...], split: list[Any], fewer: int | None = None, **options: Any
) -> Any:
    """Compare two accumulated backward passes with one device; what was sent in the first one."""
    dense, x = _model(**options)
    if fewer is not None:
        with torch.no_grad():  # all tokens go to the first experts
            dense.router.bias[fewer:] = -100.0
    net = copy.deepcopy(dense)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallelize_module(net, mesh, PLAN)
    data = sw.distribute_tensor(x, mesh, split)
    with counting() as ledger:
        out = net(data)
        out.pow(2).sum().backward()
        settle_gradients(net.parameters())
    net(data).pow(2).sum().backward()
    settle_gradients(net.parameters())
    want = dense(x)
    for result in (want, dense(x)):
        result.pow(2).sum().backward()
    torch.testing.assert_close(_full(out.detach()), want.detach(), rtol=0, atol=1e-12)
    for (name, p), q in zip(net.named_parameters(), dense.named_parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), q[1].grad, rtol=0, atol=1e-10, msg=name)
        assert p.sharding == p.grad.sharding
    assert net.experts.num_experts == dense.experts.num_experts
    return ledger


MESHES = {
    "ep 2": ((2,), ("ep",), [sw.Replicate()]),  # 3, 2
    "ep 3": ((3,), ("ep",), [sw.Replicate()]),  # 5 experts: 2, 2, 1
    "ep 4": ((4,), ("ep",), [sw.Replicate()]),  # 2, 2, 1, 0
    "ep 3, tokens split": ((3,), ("ep",), [sw.Shard(0)]),
    "ep 2, sequence split": ((2,), ("ep",), [sw.Shard(1)]),
    "ep 5, four rows": ((5,), ("ep",), [sw.Shard(0)]),  # a rank without tokens
    "dp 2, tp 2": ((2, 2), ("dp", "tp"), [sw.Shard(0), sw.Replicate()]),
    "dp 2, tp 2, tokens split twice": ((2, 2), ("dp", "tp"), [sw.Shard(0), sw.Shard(0)]),
}


@pytest.mark.parametrize("name", MESHES)
def test_routed_tokens_give_the_result_of_one_device(name: str):
    shape, names, split = MESHES[name]
    with sw.simulate(torch.Size(shape).numel()):
        _check(shape, names, split, top=1 + list(MESHES).index(name) % 3)


@pytest.mark.parametrize("fewer", [1, 3])
def test_ranks_without_tokens_take_part(fewer: int):
    with sw.simulate(4):
        _check(*MESHES["ep 4"], fewer=fewer, top=1)


def test_what_is_sent_does_not_depend_on_the_weights():
    tokens, top, size = 12, 2, 8
    with sw.simulate(2):
        ledger = _check(*MESHES["ep 2"], count=6, top=top)
        # all-reduces of the sums, and of the gradients of tokens, routing weights and the norm; each rank sends all once
        sums, weights = tokens * WIDTH * size, tokens * top * size
        assert ledger.bytes == 2 * (2 * sums + weights + 2 * WIDTH * size)
        assert {e.step for e in ledger.entries} == {"all-reduce"}


def test_split_tokens_are_sent_only_to_the_ranks_of_their_experts():
    size, top = 8, 1
    dense, x = _model(count=4, top=top)
    index = dense.router(dense.first(x).flatten(0, -2)).topk(top)[1].squeeze(1)
    home = torch.arange(12) // 3  # 4 ranks with 3 tokens each
    away = int((index != home).sum())
    with sw.simulate(4):
        ledger = _check((4,), ("ep",), [sw.Shard(0)], count=4, top=top)
    sent = [e for e in ledger.entries if e.step == "all-to-all"]
    rows = [WIDTH * size, top * size, top * 8, WIDTH * size]  # tokens, weights, experts, and sums back
    back = [WIDTH * size, top * size, WIDTH * size]  # gradients
    assert sum(e.bytes for e in sent) == away * sum(rows + back) + 4 * 3 * 8  # and how many rows there are
    # beside them only the gradients of parameters are reduced
    assert {e.step for e in ledger.entries} == {"all-to-all", "all-reduce"}
    assert sum(e.bytes for e in sent) < 2 * 3 * 12 * WIDTH * size  # gathering tokens and scattering sums once


def test_experts_that_draw_random_numbers_run_op_by_op_with_those_of_one_device():
    dense, x = _model(dropout=0.5)
    with sw.one_device():
        sw.manual_seed(3)
        want = dense(x)
    with sw.simulate(2):
        net = parallelize_module(copy.deepcopy(dense), sw.init_device_mesh("cpu", (2,)), PLAN)
        sw.manual_seed(3)
        torch.testing.assert_close(net(x), want, rtol=0, atol=1e-12)
        net.eval()
        torch.testing.assert_close(net(x), dense.eval()(x), rtol=0, atol=1e-12)


def test_experts_are_split_over_one_axis_and_sharded_over_another():
    dense, x = _model()
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        net = parallelize_module(copy.deepcopy(dense), mesh["ep"], PLAN)
        fully_shard(net, mesh=mesh["dp"])
        rows = sw.per_rank(lambda rank: x.chunk(2)[rank // 2])
        with counting() as ledger:
            net(sw.DTensor.from_local(rows, mesh["ep"], [sw.Replicate()])).pow(2).mean().backward()
        dense(x).pow(2).mean().backward()
        for (name, p), q in zip(net.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), q.grad, rtol=0, atol=1e-12, msg=name)
        over_experts = sum(e.bytes for e in ledger.entries if e.axes == ("ep",))
        assert over_experts <= 4 * 3 * 6 * WIDTH * 8  # sums and gradients of 6 tokens


def _on_processes() -> bool:
    ledger = _check(*MESHES["dp 2, tp 2"])
    _check(*MESHES["ep 4"], fewer=1, top=1)
    for top in (1, 2):
        _check((4,), ("ep",), [sw.Shard(0)], top=top, fewer=3)
    _check(*MESHES["dp 2, tp 2, tokens split twice"])
    return ledger.bytes > 0


@pytest.mark.processes
def test_tokens_are_routed_on_processes(workers: Any):
    assert all(workers.run(_on_processes))
