"""Gradients of parameters under plans: pending sums are added without communication, and reduced together for a step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.debug import CommDebugMode
from shardwise.ops.pending_gradients import settle_gradients
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LAYERS = 3


class Block(nn.Module):
    """A norm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def _styles() -> dict[str, object]:
    split, whole = sw.Shard(1), sw.Replicate()
    return {
        "*.norm": SequenceParallel(),
        "*.mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
        "*.mlp.0": ColwiseParallel(use_local_output=False),
        "*.mlp.2": RowwiseParallel(output_layouts=split, use_local_output=False),
    }


def _names() -> dict[str, object]:
    return {"*.norm": "sequence_parallel", "*.mlp.0": "colwise", "*.mlp.2": "rowwise"}


def _dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def _input(seed: int) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def _full(t: Tensor) -> Tensor:
    t = t.full_tensor() if isinstance(t, sw.DTensor) else t
    return t.ranks[-1] if isinstance(t, sw.PerRank) else t


def _parallel(dense: nn.Module, plan: dict[str, object]) -> tuple[nn.Module, sw.DeviceMesh]:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(copy.deepcopy(dense), mesh, plan), mesh


def _loss(model: nn.Module, mesh: sw.DeviceMesh, seed: int) -> Tensor:
    return model(sw.distribute_tensor(_input(seed), mesh, [sw.Shard(1)])).square().sum()


def _all_reduces(comm: CommDebugMode) -> int:
    return sum(
        n for op, n in comm.get_comm_counts().items() if "reduce" in str(op) and "scatter" not in str(op)
    )


@pytest.mark.parametrize("plan", [_styles, _names])
def test_pending_gradients_are_reduced_by_one_collective_for_a_step(plan: Callable[[], dict[str, object]]):
    dense = _dense()
    for seed in (1, 2):
        dense(_input(seed)).square().sum().backward()
    with sw.simulate(2):
        model, mesh = _parallel(dense, plan())
        model.zero_grad()
        for seed in (1, 2):
            loss = _loss(model, mesh, seed)
            before = {p: p.grad for p in model.parameters()}
            with CommDebugMode() as comm:
                loss.backward()
            assert _all_reduces(comm) == 0
            assert all(g is None or p.grad is g for p, g in before.items())
            assert any(p.grad.sharding.partial for p in model.parameters())
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), q.grad)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CommDebugMode() as comm:
            optimizer.step()
        assert _all_reduces(comm) == comm.get_total_counts() == 1
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            assert p.grad.sharding is p.sharding
            torch.testing.assert_close(_full(p.grad), q.grad)
            torch.testing.assert_close(_full(p), q - 0.1 * q.grad)


def _clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(list(model.parameters()), 1e-3)


def _unscale(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("read", "more"), [(_clip, 1), (_clip_values, 0), (_unscale, 1)])
def test_what_reads_gradients_before_a_step_reduces_them_once(read: Callable[[nn.Module], object], more: int):
    """`more`: the collectives of the norm, and of the agreement on overflows."""
    dense = _dense()
    dense(_input(1)).square().sum().backward()
    with sw.simulate(2):
        model, mesh = _parallel(dense, _styles())
        model.zero_grad()
        _loss(model, mesh, 1).backward()
        optimizer = torch.optim.AdamW(model.parameters())
        read(dense)
        with CommDebugMode() as comm:
            read(model)
            assert all(p.grad.sharding is p.sharding for p in model.parameters())
            optimizer.step()
        assert comm.get_total_counts() == 1 + more
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), q.grad)


def test_gradients_that_are_zeroed_keep_their_memory_and_stay_in_the_layout_of_the_step():
    dense = _dense()
    dense(_input(2)).square().sum().backward()
    with sw.simulate(2):
        model, mesh = _parallel(dense, _styles())
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _loss(model, mesh, 1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        known = [p.grad for p in model.parameters()]
        loss = _loss(model, mesh, 2)
        with CommDebugMode() as comm:
            loss.backward()
            assert _all_reduces(comm) == 0
        for p, q, grad in zip(model.parameters(), dense.parameters(), known, strict=True):
            assert p.grad is grad
            torch.testing.assert_close(_full(grad), q.grad)
        with CommDebugMode() as comm:
            optimizer.step()
        assert _all_reduces(comm) == 1
        for p, q, grad in zip(model.parameters(), dense.parameters(), known, strict=True):
            assert p.grad is grad
            torch.testing.assert_close(_full(p.grad), q.grad)


def _clip(w: Tensor) -> None:
    nn.utils.clip_grad_norm_([w], 0.1, foreach=True)


def _clip_values(w: Tensor) -> None:
    nn.utils.clip_grad_value_([w], 0.01)


def _step_and_scale(w: Any) -> None:
    torch.optim.SGD([w], 0.1).step()
    w.grad.mul_(2)


def _write_to_a_row(w: Any) -> None:
    row = w.grad[2]
    torch.optim.SGD([w], 0.1).step()
    row.fill_(7)
    w.grad.add_(1)


@pytest.mark.parametrize("change", [_clip, _clip_values, _step_and_scale, _write_to_a_row])
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Shard(1)])
def test_who_has_a_pending_gradient_or_a_view_of_it_sees_what_becomes_of_it(placement, change):
    def run(w: Any, x: Tensor) -> list[Any]:
        w.requires_grad_()
        (x @ w).square().sum().backward()
        have = [w.grad, w.grad[1], w.grad.detach(), w.grad.t()]
        change(w)
        assert have[0] is w.grad
        return have

    expected = run(_matrix(4, 3), _matrix(6, 4))
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        w = sw.distribute_tensor(_matrix(4, 3), mesh, [placement])
        found = run(w, sw.distribute_tensor(_matrix(6, 4), mesh, [sw.Shard(0)]))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(_full(got), want)


def test_a_step_on_parameters_without_elements():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        w = sw.distribute_tensor(torch.ones(3, 0), mesh, [sw.Partial()]).requires_grad_()
        w.square().sum().backward()
        assert w.grad.sharding is not w.sharding
        torch.optim.RMSprop([w]).step()
        assert w.grad.sharding is w.sharding


@pytest.mark.parametrize("look", [False, True])
def test_gradients_that_the_program_has_are_moved_together_too(look):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        params = [
            sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)]).requires_grad_() for _ in range(3)
        ]
        x = sw.distribute_tensor(torch.ones(6, 4), mesh, [sw.Shard(0)])
        sum((x @ w).square().sum() for w in params).backward()
        grads = [w.grad for w in params] if look else []
        with CommDebugMode() as comm:
            nn.utils.clip_grad_norm_(params, 0.1)
            torch.optim.AdamW(params).step()
        assert comm.get_total_counts() == 2, grads  # the gradients, and their norms


def test_a_gradient_does_not_wait_where_it_takes_more_memory_than_its_parameter():
    with sw.simulate(4):
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = parallelize_module(nn.Linear(4, 6), mesh, {"weight": "[o:dp, i]", "bias": "[o:dp]"})
        layer(sw.distribute_tensor(torch.ones(8, 4), mesh, [sw.Shard(0), sw.Replicate()])).sum().backward()
        assert all(p.grad.sharding is p.sharding for p in layer.parameters())


def test_gradients_that_are_read_before_the_pass_ends_are_reduced_at_once():
    dense = _dense()
    dense(_input(1)).square().sum().backward()
    with sw.simulate(2):
        model, mesh = _parallel(dense, _styles())
        model.zero_grad()
        seen: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
        _loss(model, mesh, 1).backward()
        returned = torch.autograd.grad(_loss(model, mesh, 1), list(model.parameters()))
        twice = torch.autograd.grad(_loss(model, mesh, 1), list(model.parameters()), create_graph=True)
        for (name, q), g, h in zip(dense.named_parameters(), returned, twice, strict=True):
            p = model.get_parameter(name)
            for found in (seen[name], p.grad, g, h):
                assert found.sharding is p.sharding
                torch.testing.assert_close(_full(found), q.grad)
            assert h.requires_grad


def test_a_pass_that_fails_leaves_gradients_that_the_next_pass_adds_to():
    dense = _dense()

    def interrupt(grad: Tensor) -> None:
        raise KeyError("interrupted")

    with sw.simulate(2):
        model, mesh = _parallel(dense, _styles())
        handle = model[0].norm.weight.register_hook(interrupt)
        with pytest.raises(KeyError, match="interrupted"):
            _loss(model, mesh, 1).backward()
        handle.remove()
        partial = {n: _full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        assert any(p.grad is not None and p.grad.sharding.partial for p in model.parameters())
        _loss(model, mesh, 2).backward()
        dense.zero_grad()
        dense(_input(2)).square().sum().backward()
        for (name, q), p in zip(dense.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), q.grad + partial.get(name, 0))


def test_many_gradients_are_reduced_in_parts(monkeypatch):
    dense = _dense()
    dense(_input(1)).square().sum().backward()
    monkeypatch.setattr("shardwise.ops.pending_gradients._MOST", 120)
    with sw.simulate(2):
        model, mesh = _parallel(dense, _styles())
        model.zero_grad()
        _loss(model, mesh, 1).backward()
        with CommDebugMode() as comm:
            settle_gradients(model.parameters())
        assert 1 < _all_reduces(comm) < 2 * LAYERS
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(_full(p.grad), q.grad)


def _on_processes() -> list[Tensor]:
    model, mesh = _parallel(_dense(), _styles())
    for seed in (1, 2):
        _loss(model, mesh, seed).backward()
    return [_full(p.grad) for p in model.parameters()]


@pytest.mark.processes
def test_gradients_on_processes_equal_one_device(workers: Workers):
    dense = _dense()
    for seed in (1, 2):
        dense(_input(seed)).square().sum().backward()
    for found in workers.run(_on_processes)[:2]:
        for a, q in zip(found, dense.parameters(), strict=True):
            torch.testing.assert_close(a, q.grad)


def test_waiting_gradients_of_styles_are_reduced_where_implicit_communication_is_refused():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        norm = nn.LayerNorm(4)
        sw.parallel.parallelize_module(norm, mesh, sw.parallel.SequenceParallel())
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
        x = sw.distribute_tensor(torch.randn(2, 6, 4), mesh, [sw.Shard(1)])
        with sw.policy(implicit="error"):
            (norm(x) * x).sum().backward()
            assert norm.weight.grad.sharding.partial
            optimizer.step()
        assert norm.weight.grad.sharding is norm.weight.sharding
