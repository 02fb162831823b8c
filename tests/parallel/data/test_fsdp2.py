"""Collectives and bytes of a training step, counted beside those of torch's FSDP2 for the same grouping."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm import counting
from shardwise.debug import CommDebugMode
from shardwise.fsdp import fully_shard
from shardwise.parallel import explain

ROWS = 4


class Residual(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Counter(TorchDispatchMode):
    """Counts the collectives of torch's own FSDP, and the bytes that this rank sends by the ring algorithms."""

    def __init__(self, replicas):
        super().__init__()
        self.collectives, self.bytes, self.replicas = 0, 0.0, replicas

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives += 1
            if "allgather" in name:
                self.bytes += args[0].nbytes - args[1].nbytes
            elif "reduce_scatter" in name:
                self.bytes += args[1].nbytes - args[0].nbytes
            elif "allreduce" in name:
                sent = sum(t.nbytes for t in args[0])
                self.bytes += 2 * sent * (self.replicas - 1) / self.replicas
        return func(*args, **(kwargs or {}))


def build(width, hidden, mesh, shard, **options):
    torch.manual_seed(0)
    model = Residual(width, hidden)
    for block in model.blocks:
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def count(shape, width, hidden, options):
    """Collectives and bytes of the third step: ours as predicted and counted, and torch's; and the gradients' difference."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp")[-len(shape) :])
    ours, theirs = (build(width, hidden, mesh, f, **options) for f in (fully_shard, torch_fully_shard))
    data = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model(data.clone().requires_grad_()).pow(2).sum().backward()
    for model in (ours, theirs):
        model.zero_grad()
    with counting() as ledger:
        ours(data.clone().requires_grad_()).pow(2).sum().backward()
    counter = Counter(shape[0])
    with counter:
        theirs(data.clone().requires_grad_()).pow(2).sum().backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    error = max(float((p.grad.full_tensor() - q.grad.full_tensor()).abs().max()) for p, q in pairs)
    predicted = explain(ours)
    sizes = [sum(p.numel() * 4 for p in block.parameters()) for block in (*ours.blocks, ours.head)]
    return (
        (predicted.collectives, predicted.bytes_per_rank),
        (ledger.collectives, float(ledger.bytes)),
        (counter.collectives, counter.bytes),
        sizes,
        error,
    )


@pytest.mark.processes
@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4,), {}),
        ((4,), {"reshard_after_forward": False}),
        ((4,), {"reshard_after_forward": 2}),
        ((2, 2), {}),
    ],
)
def test_collectives_and_bytes_are_never_more_than_those_of_fsdp2(workers, shape, width, options):
    found = workers.run(count, shape, width, 2 * width, options)
    for predicted, counted, torchs, _, error in found:
        assert error < 1e-4
        assert predicted[0] == counted[0] <= torchs[0]
        assert counted[1] <= torchs[1]
        if width == 8:  # torch pads what is uneven
            assert predicted[1] == counted[1] == torchs[1]
    # the lower bound: of P bytes, a rank of n receives and sends P (n - 1) / n for a gather and for a reduction
    *blocks, head = found[0][3]
    n, pods = shape[-1], math.prod(shape[:-1])
    reduced = (sum(blocks) + head) * (n - 1) / n
    gathered = (sum(blocks) + head) * (n - 1) / n
    within = options.get("reshard_after_forward", True)
    again = sum(blocks) * (n - 1) / n if within is True else 0
    if within == 2:  # torch counts the outermost module among those that gather again
        again = (sum(blocks) + head) / 2
    across = 2 * (sum(blocks) + head) / n * (pods - 1) / pods
    mean = sum(c[1] for _, c, *_ in found) / len(found)
    assert mean == pytest.approx(gathered + again + reduced + across)


def test_collectives_count_under_the_ops_that_torch_calls():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = build(4, 6, mesh, fully_shard)
        with CommDebugMode() as comm:
            loss = model(torch.ones(2, 4)).sum()
        assert comm.get_comm_counts() == {torch.ops.c10d._allgather_base_: 3}
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_] == 3


def test_what_programs_for_torch_see_of_a_sharded_module():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
        with pytest.raises(AssertionError, match="can only be applied to a module once"):
            fully_shard(model, mesh=mesh)
        assert type(model[:1]) is nn.Sequential  # slicing gives a plain module, as in torch
        assert type(copy.deepcopy(model)) is type(model)
        with pytest.raises(TypeError, match="number of buffers"):
            model.set_reduce_scatter_max_input_buffers(2.5)
        with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh but got DeviceMesh"):
            fully_shard(nn.Linear(2, 2), mesh=sw.init_device_mesh("cpu", (2, 1, 1)))
        on_meta = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
        with pytest.raises(RuntimeError, match=r"(?s)still on meta device: \['weight', 'bias'\].*why.*fix"):
            on_meta(torch.ones(2, 4))


def default_and_equal_meshes():
    """The default mesh, training on slices of two equal meshes, and the error of a hook's stream."""
    default = fully_shard(nn.Linear(4, 4)).weight.device_mesh
    one, other = (sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    model = copy.deepcopy(dense)
    plan = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}
    fully_shard(sw.parallel.parallelize_module(model, other["tp"], plan), mesh=one["dp"])
    for net in (dense, model):
        net(torch.ones(2, 4)).sum().backward()
    pairs = zip(model.parameters(), dense.parameters(), strict=True)
    same = all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6) for p, q in pairs)
    with pytest.raises(ValueError, match=r"(?s)stream cannot be set when using native HSDP.*why: .*fix: "):
        fully_shard(nn.Linear(4, 4), mesh=one).set_all_reduce_hook(print, stream=object())
    return default == sw.init_device_mesh("cpu", (4,)), same


@pytest.mark.processes
def test_meshes_are_compared_as_in_torch(workers):
    assert workers.run(default_and_equal_meshes) == [(True, True)] * 4
