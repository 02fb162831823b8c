"""Capture on meshes that are not there: what is in a program, what it says of itself, and what it refuses."""

from functools import partial

import pytest
import torch
from tests.compile.programs import Model, _tensor_plan, loss_of
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm import counting
from shardwise.compile import CaptureError, capture, fake_mesh, whole_step
from shardwise.compile.passes.dead_code import remove_dead_code
from shardwise.compile.targets import FILL
from shardwise.parallel import fully_shard, parallelize_module


def meta_step(mesh, layers=1, dropout=0.0, data=None):
    """The program of a training step on meta tensors."""
    with torch.device("meta"):
        model = Model(layers, dropout, False)
        x = torch.empty(2, 8, dtype=torch.int64)
    sw.distribute_module(parallelize_module(model, mesh["tp"], _tensor_plan(False)), mesh["tp"])
    if data is not None:
        fully_shard(model, mesh=mesh[data])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, x, x, optimizer=optimizer, modules=[model])


def tensors_of(graph):
    for node in graph.nodes:
        value = node.meta.get("val")
        yield from (
            t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)
        )


def test_nothing_of_the_tensor_class_is_left():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        program = meta_step(mesh, dropout=0.1, data="dp")
    assert not any(isinstance(t, sw.DTensor) for t in tensors_of(program.graph))
    assert {c.section for c in program.collectives} == {"forward", "backward"}
    assert {c.axes for c in program.collectives} == {("dp",), ("tp",)}
    assert all("programs.py" in c.line or "test_capture.py" in c.line for c in program.collectives)
    assert program.text().count("\n") + 1 == len(program.graph.nodes)
    with pytest.raises(CaptureError, match="without values"):
        program.run()


def test_the_size_of_the_mesh_does_not_change_the_program():
    sizes = {}
    for shape in ((2, 2), (512, 2)):
        with fake_mesh(shape, ("dp", "tp")) as mesh:
            program = meta_step(mesh, data="dp")
            sizes[shape] = (len(program.graph.nodes), len(program.collectives), program.flops())
    assert len(set(sizes.values())) == 1


def test_flops_and_memory_of_a_matrix_product():
    with fake_mesh((4,), ("tp",)) as mesh:
        x = sw.empty(8, 16, device_mesh=mesh, placements=[sw.Replicate()])
        w = sw.empty(16, 32, device_mesh=mesh, placements=[sw.Shard(1)])
        program = capture(lambda x, w: (x @ w).relu(), x, w)
        assert program.flops() == 2 * 8 * 16 * 8
        inputs, out = (8 * 16 + 16 * 8) * 4, 8 * 8 * 4
        memory = program.memory()
        assert (memory.inputs, memory.peak) == (inputs, inputs + 2 * out)
        assert program.collectives == []


def test_collectives_are_those_of_the_plan():
    with fake_mesh((4,), ("tp",)) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        program = capture(lambda x: x.redistribute(tp=sw.Shard(1)).full_tensor(), x)
        with counting() as ledger:
            x.redistribute(tp=sw.Shard(1)).full_tensor()
    found = [(c.kind, c.axes, c.group_size, c.bytes) for c in program.collectives]
    assert found == [(e.step, e.axes, e.group_size, e.bytes) for e in ledger.entries]
    assert program.bytes == ledger.bytes
    assert [c.layouts for c in program.collectives] == [("[8:tp, 6] -> [8, 6:tp]",), ("[8, 6:tp] -> [8, 6]",)]


def test_random_draws_are_numbered_from_the_position_of_the_stream():
    with fake_mesh((4,), ("tp",)) as mesh:
        x = sw.zeros(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        before = sw.get_rng_state()
        program = capture(lambda x: functional.dropout(functional.dropout(x)), x)
        assert torch.equal(sw.get_rng_state(), before)  # capture draws nothing
    fills = [n for n in program.graph.nodes if n.target is FILL]
    assert [n.args[2] for n in fills] == [0, 1]
    assert program.streams == [(mesh, 2)]


def test_dead_collectives_and_writes_that_nobody_reads_are_removed():
    def step(x):
        x.full_tensor().add_(1)
        return x * 2

    with fake_mesh((4,), ("tp",)) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        program = capture(step, x)
        assert program.collectives == []
        assert remove_dead_code(program.graph) == 0
        written = capture(lambda x: x.add_(1), x)
    assert [i.is_written for i in written.inputs] == [True]


def test_a_step_that_reads_a_value_is_refused_with_the_line():
    with fake_mesh((4,), ("tp",)) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        with pytest.raises(CaptureError, match=r"test_capture.py:\d+"):
            capture(lambda x: x * x.sum().item(), x)


@pytest.mark.parametrize("flag", ["fused", "differentiable"])
def test_optimizers_that_are_not_made_of_ops_are_refused(flag):
    with fake_mesh((4,), ("tp",)) as mesh:
        layer = sw.distribute_module(nn.Linear(4, 4), mesh)
        x = sw.ones(2, 4, device_mesh=mesh, placements=[sw.Replicate()])
        optimizer = torch.optim.Adam(layer.parameters())
        layer(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0][flag] = True
        with pytest.raises(CaptureError, match=flag):
            capture(lambda: optimizer.step(), optimizer=optimizer)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why():
    def loss_of(model, x):
        loss = model(x).square().sum()
        return loss if loss.item() > -1 else loss * 2

    with fake_mesh((1,), ("tp",)) as mesh:
        torch.manual_seed(0)
        layer = sw.distribute_module(nn.Linear(4, 4), mesh)
        x = sw.ones(2, 4, device_mesh=mesh, placements=[sw.Replicate()])
        step = whole_step(layer, torch.optim.AdamW(layer.parameters(), lr=0.01), loss_of)
        first = step(x).item()
        assert step.reason == "the first step creates the state of the optimizer"
        with pytest.warns(UserWarning, match="eagerly"):
            second = step(x).item()
        assert step(x).item() < second < first
        assert "item()" in step.reason
    with pytest.raises(ValueError, match="accumulate=0"):
        whole_step(layer, None, loss_of, accumulate=0)


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(), functional.mse_loss, partial(functional.mse_loss, reduction="sum")]
)
def test_whole_step_calls_losses_of_torch_with_the_output_and_the_target(loss_fn):
    def train(loss_fn):
        torch.manual_seed(0)
        layer = sw.distribute_module(nn.Linear(4, 4), mesh)
        step = whole_step(layer, torch.optim.AdamW(layer.parameters(), lr=0.1), loss_fn)
        losses = [step(x, y).item() for _ in range(3)]
        assert step.reason is None
        return losses

    with fake_mesh((1,), ("tp",)) as mesh:
        x, y = (sw.full((2, 4), v, device_mesh=mesh, placements=[sw.Replicate()]) for v in (1.0, 3.0))
        assert train(loss_fn) == train(lambda model, x, y: loss_fn(model(x), y))


def test_whole_step_captures_again_when_the_step_changes():
    with fake_mesh((1,), ("tp",)) as mesh:
        torch.manual_seed(0)
        layer = sw.distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        step = whole_step(layer, optimizer, lambda m, x: m(x).square().sum())
        for rows in (2, 2, 2, 3, 3):
            step(sw.ones(rows, 4, device_mesh=mesh, placements=[sw.Replicate()]))
        assert len(step.programs) == 2
        layer.eval()
        step(sw.ones(3, 4, device_mesh=mesh, placements=[sw.Replicate()]))
        assert len(step.programs) == 3
        optimizer.param_groups[0]["weight_decay"] = 0.0  # other ops than those that were captured
        step(sw.ones(3, 4, device_mesh=mesh, placements=[sw.Replicate()]))
        assert len(step.programs) == 3
        assert [int(s["step"]) for s in optimizer.state.values()] == [7, 7]


def test_inputs_that_share_memory_with_one_that_is_written_stay_in_order():
    def step(x, y):
        a = y * 1
        x.add_(1)
        return a, y * 1

    with fake_mesh((1,), ("tp",)) as mesh:
        x = sw.zeros(4, device_mesh=mesh, placements=[sw.Replicate()])
        program = capture(step, x, x.view(2, 2))
        assert [t._local_tensor.tolist() for t in program.run(x, x.view(2, 2))] == [
            [[0, 0]] * 2,
            [[1, 1]] * 2,
        ]
        assert program.optimize() is program
        with pytest.raises(CaptureError, match="shares memory"):
            program.compile("inductor")
        assert not capture(step, x, x.clone()).has_overlap
        with pytest.raises(CaptureError, match="same tensor"):
            program.run(x, x.clone().view(2, 2))
