"""Gradients of plain tensors beside DTensors are plain: of parameters, and of what comes from DTensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import is_simulated
from shardwise.parallel import parallelize_module


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x) * self.scale.exp()).relu())


def _distribute(module: nn.Module, mesh: sw.DeviceMesh) -> None:
    for name, p in list(module._parameters.items()):
        module._parameters[name] = nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [sw.Shard(0)]))


def _train(distributed: tuple[str, ...]) -> list[Any]:
    model, x = _Model(), torch.arange(12.0, dtype=torch.float64).view(3, 4).sin()
    for name in distributed:
        _distribute(getattr(model, name), sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    optimizer, out = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(3):
        with sw.policy(plain="replicate"):
            loss = model(x).square().sum()
        loss.backward()
        for p in model.parameters():
            assert type(p.grad) is (sw.DTensor if isinstance(p, sw.DTensor) else Tensor)
        out += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return [*out, model.norm.weight.sum().item()]


@pytest.mark.parametrize("names", [("up",), ("norm",), ("down",), ("up", "norm")])
def test_a_model_trains_with_plain_parameters_beside_distributed_ones(names: tuple[str, ...]) -> None:
    with sw.simulate(2):
        assert _train(names) == pytest.approx(_train(()), rel=1e-9)


def _through_plain_tensors() -> list[Any]:
    """Gradients of DTensors whose plain blocks, full values or results of modules are operands beside other DTensors."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    y = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
    out = []
    with sw.policy(plain="replicate"):
        if not is_simulated():
            for take in (sw.DTensor.full_tensor, sw.DTensor.to_local):
                x = sw.distribute_tensor(torch.ones(4), mesh).requires_grad_()
                (take(x).relu() * y).sum().backward()
                out.append(x.grad.full_tensor().tolist())
        model = parallelize_module(nn.Linear(4, 4, bias=False), mesh, {"weight": "[o:tp, i]"})
        (model(torch.ones(4)) * y).sum().backward()
        out.append(model.weight.grad.redistribute(mesh, [sw.Replicate()]).sum(1).tolist())
    return out


def test_gradients_go_through_plain_tensors() -> None:
    with sw.simulate(4):
        assert _through_plain_tensors() == [[0.0, 4.0, 8.0, 12.0]]


@pytest.mark.processes
def test_gradients_go_through_plain_tensors_on_processes(workers) -> None:
    line = [0.0, 1.0, 2.0, 3.0]
    for found in workers.run(_through_plain_tensors):
        assert found == [line, line, [4 * n for n in line]]


def test_parameters_are_hooked_once() -> None:
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        scale, y = nn.Parameter(torch.tensor(2.0)), sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
        for _ in range(3):
            (scale * y).sum().backward()
        assert len(scale._backward_hooks) == 1
        assert scale.grad.item() == 12
