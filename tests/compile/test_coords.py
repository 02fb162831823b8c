"""One capture gives the program of every rank: as if it had been captured there, and all of them run in a simulation."""

import warnings

import pytest
import torch
from tests.compile.programs import draw_case, train
from tests.compile.test_capture import meta_step
from torch.nn import functional

import shardwise as sw
from shardwise.comm import PerRank
from shardwise.compile import CaptureError, capture, fake_mesh


def text_of(program):
    return program.text(), [i.name for i in program.inputs], program.coord, program.streams


@pytest.mark.parametrize(("shape", "data"), [((2, 3), "dp"), ((3, 2), None)])
def test_the_program_of_another_coord_is_the_one_that_is_captured_there(shape, data):
    """Blocks are uneven: neither the heads nor the vocabulary divide by 3."""
    with fake_mesh(shape, ("dp", "tp")) as mesh:
        program = meta_step(mesh, dropout=0.1, data=data)
        ranks = range(shape[0] * shape[1])
        found = [program.for_rank(r) for r in ranks]
        assert program.for_coord((1, 1)) is program.for_rank(shape[1] + 1)
        texts = [text_of(p)[:3] for p in found]
        bytes_sent = [p.bytes for p in found]
    assert len({t[0] for t in texts}) > 1
    for r in ranks:
        with fake_mesh(shape, ("dp", "tp"), rank=r) as mesh:
            there = meta_step(mesh, dropout=0.1, data=data)
            assert text_of(there)[:3] == texts[r]
            assert there.bytes == bytes_sent[r]


def test_ranks_and_coords_that_a_mesh_does_not_have_are_refused():
    with fake_mesh((2, 3), ("dp", "tp")) as mesh:
        x = sw.empty(8, 6, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])
        program = capture(lambda x: x * 2, x, mesh=mesh, rank=4)
        assert program.coord == (1, 1)
        assert program.for_coord((0, 0)).coord == (0, 0)
        with pytest.raises(CaptureError, match="0 to 5"):
            capture(lambda x: x * 2, x, rank=6)
        with pytest.raises(CaptureError, match="'tp': 3"):
            program.for_coord((0, 3))


def test_a_program_that_was_captured_in_a_simulation_runs_on_all_its_ranks():
    def step(x, w):
        y = functional.dropout((x @ w).relu(), 0.5)
        w.add_(1)
        return y.redistribute(tp=sw.Replicate()), y.sum()

    with sw.simulate(3):
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        x = sw.distribute_tensor(torch.randn(4, 5), mesh, [sw.Shard(1)])
        full = torch.randn(5, 7)
        results = []
        for captured in (False, True):
            w = sw.distribute_tensor(full, mesh, [sw.Shard(0)])
            sw.manual_seed(3)
            run = capture(step, x, w).run if captured else step
            results.append([t.full_tensor().ranks[2] for _ in range(2) for t in (*run(x, w), w)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", range(6))
def test_training_in_a_simulation_is_the_same_captured(kind):
    case = draw_case(kind)
    with sw.simulate(4), warnings.catch_warnings():
        warnings.simplefilter("ignore" if case.kind == "ddp" else "error")
        eager, captured = (train(case, c, 3) for c in (False, True))
    for a, b in zip(eager[0] + eager[1], captured[0] + captured[1], strict=True):
        a, b = (x.ranks if isinstance(x, PerRank) else (x,) * 4 for x in (a, b))
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    if case.kind == "ddp":  # which computes with the tensors of all ranks
        assert "PerRank" in captured[4][-1]
    else:
        assert captured[5]
