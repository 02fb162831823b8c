"""`resize_` beyond the memory that a tensor shares with others, side by side with plain tensors."""

from __future__ import annotations

import pytest
import torch
from tests.programs.side_by_side import DifferenceError, run_program, simulated_mesh

import shardwise as sw

PROGRAMS = {
    "grow beside detach": """
        x = make((4, 3), L)
        d = x.detach()
        x.resize_(6, 3)
        with torch.no_grad(): x.fill_(7.)
        check()
        d.add_(1)
        check()
        x.mul_(2)""",
    "grow beside data": """
        x = make((5, 3), L)
        d = x.data
        x.resize_(7, 4)
        x.fill_(2.)
        d.mul_(3)""",
    "shrink and back": """
        x = make((5, 4), L)
        d = x.detach()
        v = x[1:3]
        x.resize_(2, 3)
        x.add_(1)
        check()
        x.resize_(5, 4)
        x.mul_(2)
        check()
        d.add_(1)
        v.add_(1)""",
    "grow, shrink": """
        x = make((5, 4), L)
        d = x.detach()
        x.resize_(10, 4)
        x.fill_(1.)
        x.resize_(5, 4)
        x.add_(1)
        check()
        d.add_(5)""",
    "grow d": """
        x = make((5, 4), L)
        d = x.detach()
        d.resize_(10, 4)
        d.fill_(3.)
        check()
        x.add_(1)""",
    "detach beside views": """
        x = make((5, 4), L)
        v = x.view(20)
        w = x[2]
        d = v.detach()
        x.resize_(3, 3)
        x.fill_(3.)
        check()
        d.add_(1)
        w.mul_(2)
        check()""",
    "grow beside view of detach": """
        x = make((5, 4), L)
        d = x.detach()
        w = d[2]
        x.resize_(7, 3)
        x.fill_(3.)
        check()
        w.mul_(2)
        check()""",
    "both grow": """
        x = make((4, 3), L)
        d = x.detach()
        x.resize_(6, 3)
        x.fill_(7.)
        d.resize_(5, 3)
        check()
        d.add_(1)
        check()
        x.mul_(2)
        d.resize_(8, 3)
        d.fill_(2.)
        check()
        x.add_(1)""",
    "views of the grown": """
        x = make((4, 3), L)
        d = x.detach()
        x.resize_(6, 3)
        x.fill_(7.)
        r = x[1:5]
        c = x[:, 1]
        d.mul_(2)
        r.add_(1)
        c.zero_()
        check()
        x.unfold(0, 2, 1)[:, 0].fill_(-1)
        e = x.detach()
        e.add_(3)
        check()
        x.resize_(3, 2)
        x.fill_(9.)
        check()
        x.resize_(6, 3)
        x.sub_(4)""",
    "a view grows": """
        x = make((6, 3), L)
        v = x[2:4]
        v.resize_(3, 4)
        v.fill_(1.)
        check()
        v.resize_(5, 4)
        v.fill_(2.)
        check()
        x.add_(1)
        v.mul_(3)""",
    "transposed": """
        x = make((6, 4), L).t()
        x.resize_(2, 5)
        x.fill_(3.)
        x.resize_(4, 6)""",
    "a transposed clone": """
        x = make((6, 4), L).t().clone()
        d = x.detach()
        x.resize_(2, 5)
        x.fill_(3.)
        check()
        x.resize_(7, 5)
        x.fill_(4.)
        d.mul_(2)""",
    "copied": """
        x = make((4, 3), L)
        d = x.detach()
        x.resize_(6, 3)
        x.fill_(7.)
        a, b = deepcopy([x, d])
        a.add_(1)
        check()
        b.mul_(2)
        check()
        s, = saved([x])
        s.add_(1)
        x.add_(3)""",
    "computed": """
        x = make((4, 3), L)
        d = x.data
        x.resize_(6, 4)
        x.fill_(7.)
        d.mul_(torch.arange(12.).view(4,3).tolist()[1][1])
        y = (x @ x.t()).sum(0)
        z = torch.cat([x, x], 1).softmax(1)
        torch.add(x, 1, out=x)
        d.copy_(y[:3] * 0.5)
        check()
        torch.mul(x[:2], 2, out=d)""",
    "no others": """
        x = make((4, 3), L)
        x.resize_(6, 3)
        x.zero_()
        x += 1
        y = x * 2
        x.resize_(0)
        x.resize_(2, 2)
        x.fill_(1.)""",
    "grad later": """
        x = make((4, 3), L)
        d = x.detach()
        x.resize_(6, 3)
        x.fill_(7.)
        x.requires_grad_()
        y = (x * x).sum()
        y.backward()
        d.add_(1)""",
    "resize_as": """
        x = make((4, 3), L)
        d = x.detach()
        v = x[1]
        x.resize_as_(make((5, 5), L))
        x.fill_(7.)
        check()
        v.add_(1)
        d.add_(1)
        x.neg_()""",
    "out": """
        x = make((4, 3), L)
        d = x.detach()
        a = make((6, 3), L, seed=3)
        torch.mul(a, 2, out=x)
        check()
        d.add_(1)""",
    "channels": """
        x = make((2, 3, 2, 2), L)
        d = x.detach()
        x.resize_(2, 3, 3, 3, memory_format=torch.channels_last)
        x.fill_(7.)
        check()
        d.add_(1)""",
    "empty": """
        x = make((0, 3), L)
        d = x.detach()
        x.resize_(4, 3)
        x.fill_(7.)""",
    "set": """
        x = make((4, 3), L)
        d = x.detach()
        y = make((3, 2), L)
        y.set_(x)
        y.resize_(6, 3)
        y.fill_(7.)
        check()
        x.add_(1)
        d.add_(1)""",
    "swap": """
        x = make((4, 3), L)
        d = x.detach()
        y = make((5, 3), L, seed=2)
        x.resize_(6, 3)
        x.fill_(7.)
        torch.utils.swap_tensors(x, y)
        y.add_(1)
        check()
        d.mul_(3)
        x.add_(1)""",
    "data assigned": """
        x = make((4, 3), L)
        d = x.detach()
        y = make((5, 3), L, seed=2)
        x.resize_(6, 3)
        x.fill_(7.)
        y.data = x
        y.add_(1)
        check()
        x.data = make((2, 3), L)
        d.mul_(3)
        x.add_(1)""",
    "no_grad params": """
        x = make((4, 3), L, grad=True)
        with torch.no_grad(): x.resize_(4, 3)
        x.resize_(6, 3)""",
    "inference": """
        with torch.inference_mode(): x = make((4, 3), L) * 1
        with torch.inference_mode(): d = x.detach()
        with torch.inference_mode(): x.resize_(6, 3)
        with torch.inference_mode(): x.fill_(7.)
        with torch.inference_mode(): d.mul_(2)
        check()
        with torch.inference_mode(): x.add_(1)""",
}
ONE_DIM = """
        x = make((5,), L)
        d = x.detach()
        v = x[1:3]
        x.resize_(9)
        x.fill_(7.)
        v.add_(1)
        check()
        d[2:].zero_()
        x.resize_(4)
        x.add_(1)
        check()
        x.resize_(12)
        x.fill_(2.)
        check()
        d.add_(1)"""
LAYOUTS = {
    (2,): ("0", "1", "R"),
    (3,): ("0", "1", "P"),
    (8,): ("0",),
    (2, 2): ("0 0", "0 1", "1 0", "0 R", "R 1", "1 1"),
}


def lines_of(program: str, layout: str) -> list[str]:
    lines = [line.strip() for line in program.split("\n") if line.strip()]
    return [line.replace("L)", f"{layout!r})").replace("L,", f"{layout!r},") for line in lines]


@pytest.mark.parametrize("name", PROGRAMS)
def test_tensors_that_shared_memory_still_do(name):
    for sizes, layouts in LAYOUTS.items():
        with simulated_mesh(sizes) as mesh:
            for layout in layouts:
                if layout != "P" or name == "grow beside detach":
                    run_program(lines_of(PROGRAMS[name], layout), mesh)


@pytest.mark.parametrize("layout", ["0", "R"])
def test_one_dim(layout):
    with simulated_mesh((3,)) as mesh:
        run_program(lines_of(ONE_DIM, layout), mesh)


def test_a_part_of_a_larger_memory_is_refused():
    with sw.simulate(2):
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(6, 4), mesh, [sw.Shard(1)])
        with pytest.raises(RuntimeError, match="parts of a larger memory"):
            x[2:4].detach().resize_(5, 4)


def test_the_comparison_notices_memory_that_is_not_shared():
    program = lines_of(PROGRAMS["grow beside detach"], "0")
    with simulated_mesh((2,)) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.ops.inplace_view.grown", lambda *args: None)
        with pytest.raises(DifferenceError):
            run_program(program, mesh)


def _on_a_rank():
    mesh = sw.init_device_mesh("cpu", (4,))
    out = []
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        x = sw.distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [placement])
        d, v = x.detach(), x[1]
        x.resize_(7, 3).fill_(2.0)
        d.mul_(3)
        v.add_(1)
        x.add_(1)
        out.append([t.full_tensor().tolist() for t in (x, d, v)])
    return out


def test_on_processes(workers):
    d = torch.full((5, 3), 7.0)
    d[1] += 1
    x = torch.full((7, 3), 3.0)
    x[:5] = d
    assert workers.run(_on_a_rank) == [[[t.tolist() for t in (x, d, d[1])]] * 3] * 4
