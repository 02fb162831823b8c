"""Models on four real processes against one device: training, initial values, dropout, plain inputs and checks."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from tests.parallel.models import CASES, loss_of
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.launch import Workers
from shardwise.parallel import parallelize_module

MESHES = {"tp": ((4,), ("tp",)), "dp, tp": ((2, 2), ("dp", "tp"))}


def _full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, sw.DTensor) else t


def _steps(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    out = []
    for i, (x, y) in enumerate(batches):
        loss = loss_of(model(x), y)
        loss.backward()
        out.append(_full(loss.detach()))
        if i % 2:  # two micro-batches per step
            out.append(_full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            opt.step()
            opt.zero_grad()
    return out


def _train(name: str, plan: str, mesh_name: str) -> float:
    """The greatest difference between a run on this mesh and the run of one device, done on every rank."""
    case, (shape, names) = CASES[name], MESHES[mesh_name]
    torch.set_default_dtype(torch.float64)
    micro = [case.batch(i) for i in range(6)]
    sw.manual_seed(5)
    with sw.one_device():
        dense = case.build()
        initial = copy.deepcopy(dense)
        sw.manual_seed(7)
        want = _steps(dense, micro)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with torch.device("meta"):
        model = case.build()
    parallelize_module(model, mesh, case.plans[plan])
    sw.manual_seed(5)
    sw.materialize(model)
    same_bits = all(
        torch.equal(_full(p), q) for p, q in zip(model.parameters(), initial.parameters(), strict=True)
    )
    if len(shape) == 2:
        split = [sw.Shard(0), sw.Replicate()]
        micro = [tuple(sw.distribute_tensor(t, mesh, split) for t in pair) for pair in micro]
    sw.manual_seed(7)
    got = _steps(model, micro)
    pairs = [
        *zip(got, want, strict=True),
        *zip(model.state_dict().values(), dense.state_dict().values(), strict=True),
    ]
    torch.set_default_dtype(torch.float32)
    return max(float((_full(a) - b).abs().max()) for a, b in pairs) if same_bits else float("nan")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        (name, plan, mesh)
        for name, plan in [
            ("gpt", "sp"),
            ("llama", "tp"),
            ("convnet", "tp"),
            ("moe", "ep"),
            ("uneven llama", "tp"),
        ]
        for mesh in MESHES
    ][:: 1 if os.environ.get("SHARDWISE_DEEP") == "1" else 3],
)
def test_models_on_processes_equal_one_device(workers: Workers, name, plan, mesh):
    assert all(difference < 1e-9 for difference in workers.run(_train, name, plan, mesh))


class _Shifted(nn.Module):
    """Adds a plain tensor of its own that differs between ranks, if `differs`."""

    def __init__(self, differs: bool) -> None:
        super().__init__()
        self.linear, self.differs = nn.Linear(4, 4), differs

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(4.0) * (dist.get_rank() if self.differs else 1)


def _checked(differs: bool) -> str:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = parallelize_module(_Shifted(differs), mesh, {"linear": "colwise"})
    try:
        with sw.policy(plain="check"):
            out = model(torch.ones(2, 4))
    except sw.PlainTensorError as error:
        return str(error)
    return type(out).__name__


@pytest.mark.processes
def test_plain_tensors_that_the_module_makes_are_compared_on_request(workers: Workers):
    assert set(workers.run(_checked, False)) == {"Tensor"}
    messages = workers.run(_checked, True)
    assert len(set(messages)) == 1
    assert "differs between ranks" in messages[0]
