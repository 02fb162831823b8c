"""Passes keep the results, and do what they say: by equality in a simulation, and by counting."""

from collections import Counter

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.compile import EXACT, FAST, NONE, Passes, capture, fake_mesh
from shardwise.compile.targets import Begin, Finish


def kinds(program, section=None):
    return Counter(c.kind for c in program.collectives if section in (None, c.section))


class Projections(nn.Module):
    """Three projections of a tensor that is split along the sequence, added up."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))

    def forward(self, x):
        return sum((x @ w).relu() for w in (self.q, self.k, self.v))


def projections(mesh):
    torch.manual_seed(0)
    model = Projections()
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [sw.Shard(1)])))
    x = sw.distribute_tensor(torch.randn(8, 6), mesh, [sw.Shard(0)]).requires_grad_()

    def step(x):
        y = model(x.redistribute(placements=[sw.Shard(0)]))
        y.square().sum().backward()

    return model, x, step


def gathered(model, x):
    """Forward and backward by gathering x for each projection."""
    ys = [(x.redistribute(placements=[sw.Replicate()]) @ w).relu() for w in model.parameters()]
    sum(ys).square().sum().backward()


def test_projections_of_a_split_sequence_gather_once_and_scatter_once():
    with fake_mesh((2,), ("tp",)) as mesh:
        model, x, _ = projections(mesh)
        program = capture(lambda x: gathered(model, x), x, modules=[model])
        assert kinds(program, "forward")["all-gather"] == 3
        assert kinds(program, "backward") == {"reduce-scatter": 3}
        exact = program.optimize(Passes(bucket=0, overlap=0))
        assert kinds(exact) == {"all-gather": 1, "reduce-scatter": 3}
        assert exact.passes["reuse"] == 2
        fast = program.optimize(Passes(bucket=0, overlap=0, reassociate=True))
        assert kinds(fast) == {"all-gather": 1, "reduce-scatter": 1}
        assert kinds(program)["all-gather"] == 3  # the program itself stays as it is


@pytest.mark.parametrize("passes", [NONE, EXACT, FAST, Passes(bucket=1 << 20, reassociate=True, overlap=1)])
def test_results_stay_the_same(passes):
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = []
        for optimized in (False, True):
            model, x, _ = projections(mesh)
            if optimized:
                program = capture(lambda x, m=model: gathered(m, x), x, modules=[model])
                program.optimize(passes).run(x)
            else:
                gathered(model, x)
            found.append([t.grad.full_tensor().ranks[1] for t in (x, *model.parameters())])
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-6) if passes.reassociate else torch.equal(a, b)


def test_a_block_that_is_written_to_is_moved_again():
    def step(x):
        a = x.full_tensor()
        x.add_(1)
        b = x.full_tensor()
        c = x.full_tensor()
        c.mul_(2)  # its own memory
        return a, b, c

    with fake_mesh((2,), ("tp",)) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0)])
        assert kinds(capture(step, x).optimize(Passes(bucket=0))) == {"all-gather": 3}
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        full = torch.arange(8.0)
        eager, captured = (sw.distribute_tensor(full.clone(), mesh, [sw.Shard(0)]) for _ in range(2))
        program = capture(step, captured).optimize(EXACT)
        for a, b in zip(step(eager), program.run(captured), strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a.ranks, b.ranks, strict=True))


def test_moves_that_do_not_wait_for_each_other_are_one_up_to_a_size():
    def step(xs):
        return [x.full_tensor() for x in xs]

    with fake_mesh((2,), ("tp",)) as mesh:
        xs = [sw.empty(8, 16, device_mesh=mesh, placements=[sw.Shard(0)]) for _ in range(6)]
        program = capture(step, xs)
        assert len(program.optimize(Passes(bucket=0)).collectives) == 6
        merged = program.optimize(Passes(bucket=1 << 20))
        assert len(merged.collectives) == 1
        assert merged.bytes == program.bytes
        assert len(program.optimize(Passes(bucket=2 * 4 * 16 * 4)).collectives) == 3
        with sw.costs(sw.CostModel(latency=1e-9, bandwidth=1e9)):
            assert len(program.optimize().collectives) == 6


def test_moves_that_need_each_other_are_not_merged():
    with fake_mesh((2,), ("tp",)) as mesh:
        x = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
        y = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])

        def step(x, y):
            a = x.redistribute(tp=sw.Replicate())
            return (a.relu() + y.redistribute(tp=sw.Replicate())).redistribute(tp=sw.Shard(1))

        assert kinds(capture(step, x, y).optimize(Passes(bucket=1 << 20))) == {"all-gather": 2}


def test_collectives_start_early_and_end_late():
    def step(x, w):
        a = (w @ w).relu()
        b = (a @ w).relu()
        return b + x.redistribute(tp=sw.Replicate()) @ w

    with fake_mesh((2,), ("tp",)) as mesh:
        x = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
        w = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Replicate()])
        program = capture(step, x, w).optimize(Passes(reuse=False, bucket=0))
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    begin = next(i for i, n in enumerate(nodes) if isinstance(n.target, Begin))
    finish = next(i for i, n in enumerate(nodes) if isinstance(n.target, Finish))
    assert begin == 0
    assert finish >= 5  # two products and their activations are computed meanwhile
    assert program.passes == {"overlap": 1}
    assert kinds(program) == {"all-gather": 1}
    program.graph.lint()


def test_a_source_is_not_written_to_while_it_is_sent():
    def step(x, w):
        y = x.redistribute(tp=sw.Replicate())
        x.mul_(0)
        return (w @ w) + y

    with fake_mesh((2,), ("tp",)) as mesh:
        x = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Shard(0)])
        w = sw.empty(8, 8, device_mesh=mesh, placements=[sw.Replicate()])
        program = capture(step, x, w).optimize(Passes(bucket=0))
    names = [getattr(n.target, "label", getattr(n.target, "__name__", "")) for n in program.graph.nodes]
    assert names.index("finish_all_gather") < names.index("mul_.Tensor")
