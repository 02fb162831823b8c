"""Gradient scaling, autocast and selective checkpointing of parallelized modules equal one device."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.parallel.input_reshard import input_reshard

PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


class Stack(nn.Module):
    """Feed-forward blocks, checkpointed if a context function is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.Dropout(0.2)) for _ in range(2)
        )
        self.context_fn = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.context_fn is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return x


def _full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[0] if isinstance(t, sw.PerRank) else t


def _mesh(ranks: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_grad_scaler_scales_skips_and_grows_as_on_one_device(autocast: bool):
    torch.manual_seed(0)
    first, x = Stack().eval(), torch.randn(5, 6)

    def run(net: nn.Module) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        seen = []
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = net(x * (float("inf") if step == 2 else 1.0)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [torch.tensor(scaler.get_scale()), *(_full(p.detach()).clone() for p in net.parameters())]
        return seen

    with sw.simulate(2):
        got = run(parallelize_module(copy.deepcopy(first), _mesh(2), PLAN))
    want = run(first)
    assert [float(t) for t in want if t.dim() == 0] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 if autocast else 1e-6)


@pytest.mark.parametrize("rows", [4, 5])
def test_an_overflow_on_one_rank_is_seen_by_all(rows: int):
    with sw.simulate(3):
        layer = parallelize_module(nn.Linear(4, rows), _mesh(3), {"": "colwise"})
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        before = _full(layer.weight.detach()).clone()
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        layer.weight.grad[3, 3] = float("inf")  # a row of the second rank; the third has one row or none
        with CommDebugMode() as comm:
            scaler.unscale_(optimizer)
        assert comm.get_total_bytes() <= 3 * 2 * 4  # one number, and no gradients
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.equal(_full(layer.weight.detach()), before)


@pytest.mark.parametrize("saved", [(), (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_selective_checkpointing_recomputes_what_it_did_not_save(saved: tuple, ranks: int):
    calls: Counter[str] = Counter()

    def policy(ctx, op, *args, **kwargs):
        calls["recomputed" if ctx.is_recompute else "forward"] += op in (saved or ())
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    first, x = Stack().double(), torch.randn(5, 6, dtype=torch.float64)
    context_fn = partial(create_selective_checkpoint_contexts, policy)

    def gradients(net: nn.Module, context_fn=None) -> list[Tensor]:
        sw.manual_seed(4)
        net.context_fn = context_fn
        loss = net(x).pow(2).mean()
        loss.backward()
        return [_full(loss.detach()), *(_full(p.grad) for p in net.parameters())]

    with sw.one_device():
        want = gradients(copy.deepcopy(first))
    with sw.simulate(ranks):
        net = parallelize_module(copy.deepcopy(first), _mesh(ranks), PLAN)
        with CommDebugMode() as comm:
            got = gradients(net, context_fn)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert bool(saved) == bool(calls["forward"]), calls
    assert comm.ledger.entries


def _unscale(mesh: sw.DeviceMesh) -> list[Tensor]:
    """Unscale gradients on the mesh, on one of its axes, pending, and plain ones; the first overflows if it is split."""
    full = torch.arange(1.0, 21.0).view(5, 4)
    dtensors = [
        sw.distribute_tensor(full, mesh, [sw.Shard(0), sw.Shard(1)]),
        sw.distribute_tensor(full, mesh["tp"], [sw.Shard(0)]),
        sw.distribute_tensor(full, mesh, [sw.Partial(), sw.Replicate()]),
    ]
    grads, results = [*dtensors, full.clone()], []
    for bad in (None, 4, 0):
        if bad is not None:
            dtensors[0][bad, 3] = float("nan")
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
        results.append(found.clone())
    return [*results, *(_full(g).nan_to_num(0.0) for g in grads[1:]), _full(dtensors[0])[1]]


def _expected() -> list[Tensor]:
    eighth = torch.arange(1.0, 21.0).view(5, 4) / 8
    return [torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0), eighth, eighth, eighth, eighth[1]]


def test_gradients_on_several_meshes_are_unscaled_where_they_are():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for a, b in zip(_unscale(mesh), _expected(), strict=True):
            assert torch.equal(a, b)


def test_a_scaler_under_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with sw.simulate(2):
            mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            p = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh, [sw.Shard(0)]))
            optimizer, scaler = torch.optim.SGD([p], lr=0.5), torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.tensor(1.0))
            p.grad = sw.distribute_tensor(torch.full((3,), 8.0), mesh, [sw.Shard(0)])
            scaler.step(optimizer)
            assert torch.equal(_full(p.detach()), torch.full((3,), 0.5))
    finally:
        torch.set_default_dtype(torch.float32)


def _unscale_on_processes() -> list[Tensor]:
    return _unscale(sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


@pytest.mark.processes
def test_gradients_are_unscaled_alike_on_processes(workers):
    for found in workers.run(_unscale_on_processes):
        for a, b in zip(found, _expected(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [None, 0, 1, 5])
def test_inputs_that_autograd_saves_are_split_and_gathered_again(dim):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    x = torch.randn(5, 6)
    dense(x * 1).square().sum().backward()
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(
            copy.deepcopy(dense), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        model.zero_grad()
        assert input_reshard(model, mesh, dim) is model
        given = sw.distribute_tensor(x, mesh, [sw.Replicate()])
        loss = model((given * 1).requires_grad_() * 1).square().sum()
        with CommDebugMode() as comm:
            loss.backward()
        gathers = comm.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
        assert (gathers > 0) == (dim in (0, 1))
        for p, q in zip(dense.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor().ranks[1], p.grad)
