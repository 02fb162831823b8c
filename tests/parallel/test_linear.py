"""Linear layers of plans, which run as one autograd function on processes: values and gradients of all orders."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.parallel.linear import linear


class Net(nn.Module):
    """Two linear layers, whose inner width leaves a rank of four without features."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 3, bias=bias), nn.Linear(3, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


STYLES = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
NAMES = {"up": "colwise", "down": "rowwise"}
MESHES = {"tp": ((4,), ("tp",)), "dp, tp": ((2, 2), ("dp", "tp"))}


def _full(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, sw.DTensor) else t


def _everything(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Results and gradients of first and second order, plain, checkpointed in and out of a mode, and in autocast."""
    net.zero_grad()  # a copy of a module has its gradients
    out = net(x)
    found = [out]
    parameters = [p for p in net.parameters() if p.requires_grad]
    first = torch.autograd.grad(out.square().sum(), [x, *parameters], create_graph=True)
    found += first
    found += torch.autograd.grad(sum(g.pow(3).sum() for g in first), [x, *parameters])
    with CommDebugMode():
        again = checkpoint(net, x, use_reentrant=False)
    again.square().sum().backward()
    found += [p.grad for p in parameters]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(copy.deepcopy(net).float()(x.detach().float()).double())
    with torch.no_grad():
        found.append(net(x))
    return [_full(t).detach() for t in found]


def _model(bias: bool, dims: int, frozen: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = Net(bias).double()
    net.up.weight.requires_grad_(not frozen)
    return net, torch.randn(4, *([2] * (dims - 2)), 6, dtype=torch.float64)


CASES = [
    (plan, mesh, bias, dims, frozen)
    for plan, mesh in [(STYLES, "tp"), (NAMES, "tp"), (NAMES, "dp, tp")]
    for bias, dims, frozen in [(True, 3, False), (False, 2, True)]
]


def _on_processes() -> list[list[Tensor]]:
    found = []
    for plan, mesh_name, bias, dims, frozen in CASES:
        shape, names = MESHES[mesh_name]
        net, x = _model(bias, dims, frozen)
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(net, mesh, copy.deepcopy(plan))
        split = [sw.Shard(0), sw.Replicate()] if len(shape) == 2 else [sw.Replicate()]
        data = sw.distribute_tensor(x, mesh, split).requires_grad_()
        out = net.up(data) if plan is STYLES else linear(net.up, data)
        if not type(out.grad_fn).__name__.startswith("_Linear"):
            raise TypeError(f"not one function: {out.grad_fn}")
        found.append(_everything(net, data))
        found.append(_everything(copy.deepcopy(net), data))
    return found


@pytest.mark.processes
def test_linear_layers_on_processes_equal_one_device(workers: Workers):
    expected = []
    for _, _, bias, dims, frozen in CASES:
        net, x = _model(bias, dims, frozen)
        expected += [_everything(copy.deepcopy(net), x.requires_grad_()) for _ in range(2)]
    for found in workers.run(_on_processes):
        for i, (got, want) in enumerate(zip(found, expected, strict=True)):
            for j, (a, b) in enumerate(zip(got, want, strict=True)):
                tolerance = 0.02 if j == len(want) - 2 else 1e-10
                torch.testing.assert_close(
                    a, b, rtol=0, atol=tolerance, msg=lambda m, at=(i, j): f"{at}: {m}"
                )
