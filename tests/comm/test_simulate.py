"""Simulating all ranks in one process: entering and leaving, sizes, dry runs, meshes, collectives."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import shardwise as sw
from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
    plan_redistribute,
    simulate,
)
from shardwise.comm import axes_of, counting, is_simulated, members_of
from shardwise.comm.run import run
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import Layout
from shardwise.torch_internals.mesh import innermost_mesh

run_module = importlib.import_module("shardwise.comm.run")  # the package has functions of these names
simulate_module = importlib.import_module("shardwise.comm.simulate")
R = Replicate()


def grid(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


def outside():
    """Whether no simulation is left in this process."""
    return not is_simulated() and not dist.is_initialized() and innermost_mesh() is None


# ---- entering and leaving


def test_a_simulation_ends_with_its_block():
    assert outside()
    with simulate(3):
        assert is_simulated()
        assert dist.is_initialized()
        assert dist.get_world_size() == 3
    assert outside()


def fail_inside(error):
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        mesh.__enter__()  # without __exit__
        distribute_tensor(grid(4), placements=[Shard(0), R]).full_tensor()
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_simulation_ends_after_an_exception(error):
    with pytest.raises(error):
        fail_inside(error)
    assert outside()
    with simulate(2):
        assert distribute_tensor(grid(3), init_device_mesh("cpu", (2,)), [Shard(0)]).sum().item() == 3


def test_the_current_mesh_is_restored():
    with simulate(2):
        old = init_device_mesh("cpu", (2,))
    with old:
        with simulate(4), init_device_mesh("cpu", (4,)) as new:
            assert distribute_tensor(grid(4)).device_mesh is new
        assert innermost_mesh() is old
    assert outside()


def test_the_group_may_be_destroyed_inside():
    with simulate(2):
        dist.destroy_process_group()
    assert outside()


def test_simulations_do_not_nest():
    with simulate(4):
        with (
            pytest.raises(
                RuntimeError, match=r"(?s)simulate\(2\) was called inside simulate\(4\).*\n  why: .*\n  fix: "
            ),
            simulate(2),
        ):
            pytest.fail("entered a nested simulation")
        assert dist.get_world_size() == 4
        assert is_simulated()
        x = distribute_tensor(grid(4), init_device_mesh("cpu", (4,)), [Shard(0)])
        assert x.full_tensor().ranks[3].tolist() == [0, 1, 2, 3]
    assert outside()


def test_a_rank_of_a_process_group_cannot_simulate(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group replaces it
    dist.init_process_group("fake", rank=1, world_size=3)
    try:
        with (
            pytest.raises(RuntimeError, match=r"(?s)group of 3 real ranks.*\n  why: .*\n  fix: "),
            simulate(2),
        ):
            pytest.fail("entered a simulation inside a process group")
        assert (dist.get_rank(), dist.get_world_size(), is_simulated()) == (1, 3, False)
    finally:
        dist.destroy_process_group()


def in_a_group():
    try:
        with simulate(2):
            return "entered"
    except RuntimeError as error:
        return str(error)


def test_real_processes_cannot_simulate(workers):
    for message in workers.run(in_a_group):
        assert "group of 4 real ranks" in message


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None, True])
def test_the_world_size_is_a_positive_int(size):
    with pytest.raises(ValueError, match=r"(?s)world_size must be .*\n  why: .*\n  fix: "), simulate(size):
        pytest.fail("entered a simulation of this size")
    assert outside()


def test_one_simulation_after_the_other():
    kept = []
    for n in (1, 2, 3, 2, 1):
        with simulate(n):
            mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
            x = distribute_tensor(grid(5), mesh, [Shard(0)])
            kept.append(x)
            assert len(x.to_local().ranks) == n
            assert x.full_tensor().ranks[-1].tolist() == [0, 1, 2, 3, 4]
    # blocks outlive their simulation
    assert [len(x.to_local().ranks) for x in kept] == [1, 2, 3, 2, 1]


# ---- what a simulation leaves behind


def state_of_the_process():
    """What a simulation must not change: hooks, logging, warnings, the environment, torch.distributed."""
    c10d = dist.distributed_c10d
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    return {
        "hooks": (sys.excepthook, sys.displayhook, warnings.showwarning, threading.excepthook),
        "logging": [
            (x.name, x.level, list(x.handlers), list(x.filters), x.disabled, x.propagate)
            for x in loggers
            if isinstance(x, logging.Logger)
        ],
        "disabled": logging.root.manager.disable,
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "groups": (
            dist.is_initialized(),
            dist.group.WORLD,
            dict(c10d._world.pg_map),
            c10d._world.group_count,
        ),
        "tags": (dict(c10d._world.pg_to_tag), dict(c10d._world.tags_to_pg), dict(c10d._world.pg_names)),
        "backends": dict(dist.Backend.default_device_backend_map),
        "mesh": (sw.DeviceMesh.__init__, innermost_mesh(), is_simulated()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().tolist()),
        "threads": threading.active_count(),
    }


@contextlib.contextmanager
def unchanged():
    """Fail if the block changes the state of the process."""
    with simulate(2):  # imports what simulations need
        distribute_tensor(grid(4), init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()
    before = state_of_the_process()
    yield
    for name, value in state_of_the_process().items():
        assert value == before[name], name


def test_a_simulation_leaves_no_trace():
    with unchanged(), simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(grid(6, 5).requires_grad_(), mesh, [Shard(0), Shard(1)])
        x.redistribute(tp=R).full_tensor().sum().backward()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_trace(error):
    with unchanged(), pytest.raises(error):
        fail_inside(error)


def test_a_thousand_simulations_leave_no_trace():
    groups = []
    with unchanged():
        for i in range(1000):
            with simulate(1 + i % 4):
                if i % 100 == 0:
                    x = distribute_tensor(grid(3), init_device_mesh("cpu", (1 + i % 4,)), [Shard(0)])
                    x.full_tensor()
                groups.append(weakref.ref(dist.group.WORLD))
    del x
    gc.collect()
    assert not any(group() for group in groups)


def test_the_first_simulation_of_a_process_leaves_no_trace():
    code = """
        import os, sys, warnings
        import torch.distributed as dist
        import shardwise as sw

        def state():
            backends = dict(dist.Backend.default_device_backend_map)
            return sys.excepthook, list(warnings.filters), dict(os.environ), backends, sw.DeviceMesh.__init__

        before = state()
        with sw.simulate(4):
            sw.init_device_mesh("cpu", (2, 2))
        assert state() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_hook_that_is_set_inside_stays(monkeypatch):
    def hook(*args):
        pass

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with simulate(2):
        sys.excepthook = hook
    assert sys.excepthook is hook


def test_meshes_and_their_recipes_are_collected():
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = per_rank(lambda rank: grid(2, 3))
        for m, placements in ((mesh, [Shard(0), Partial()]), (mesh["tp"], [Shard(1)])):
            layout = DTensor.from_local(local, m, placements).sharding
            run(plan_redistribute(layout, Layout.replicated(layout.shape, layout.axes)), local, m)
        meshes = [weakref.ref(m) for m in (mesh, mesh["tp"], m)]
        del mesh, m
        gc.collect()
        assert not any(m() for m in meshes)


def test_recipes_of_a_mesh_that_outlives_its_simulation_are_dropped():
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        distribute_tensor(grid(4), mesh, [Shard(0)]).full_tensor()
        assert run_module._programs._kept[id(mesh)]
    assert not run_module._programs._kept[id(mesh)]
    assert axes_of(mesh).sizes == (2,)  # computed again
    assert members_of(mesh) == {0: (0,), 1: (1,)}


def test_callbacks_at_the_end_of_a_simulation(monkeypatch):
    called = []

    def fail():
        called.append("failing")
        raise LookupError

    monkeypatch.setattr(simulate_module, "_at_end", [])
    at_simulation_end(lambda: called.append(outside()))
    with simulate(2):
        assert called == []
    assert called == [True]
    at_simulation_end(fail)
    at_simulation_end(lambda: called.append(outside()))
    with pytest.raises(LookupError), simulate(2):
        called.clear()
    assert called == [True, "failing", True]
    with pytest.raises(LookupError) as caught, simulate(2):
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    assert outside()


# ---- world sizes


def test_a_world_of_one():
    with simulate(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        x = distribute_tensor(grid(5, 3).requires_grad_(), mesh, [Shard(0)])
        with counting() as ledger:
            y = x.redistribute(tp=Shard(1)).redistribute(tp=R)
            y.full_tensor().sum().backward()
        assert ledger.collectives == 0
        assert torch.equal(x.grad.full_tensor().ranks[0], torch.ones(5, 3))


def test_a_world_of_sixty_four():
    with simulate(64):
        mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        x = distribute_tensor(grid(9, 5, 6).requires_grad_(), mesh, [Shard(0), Shard(2), Shard(0)])
        y = x.redistribute(a=Shard(1), b=R)
        assert all(torch.equal(t, grid(9, 5, 6)) for t in y.full_tensor().ranks)
        (y.full_tensor() * grid(9, 5, 6)).sum().backward()
        assert x.grad.placements == x.placements
        assert torch.equal(x.grad.full_tensor().ranks[17], grid(9, 5, 6))


# ---- dry runs on meta tensors


MESHES = {(8,): ("x",), (2, 4): ("x", "y"), (2, 2, 2): ("x", "y", "z")}


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_meta_tensors_send_what_real_ones_do(sizes, op):
    some = (Shard(0), Shard(1), R, Partial(op))
    pairs = list(itertools.product(itertools.product(some, repeat=len(sizes)), repeat=2))
    with simulate(8):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=MESHES[sizes])
        for at, (a, b) in enumerate(pairs[:: max(1, len(pairs) // 60)]):
            shape = ((8, 8), (5, 3), (1, 7), (0, 4))[at % 4]
            dtype = (torch.float32, torch.int16, torch.bfloat16)[at % 3]
            real = distribute_tensor(torch.ones(shape, dtype=dtype), mesh, a)
            meta = distribute_tensor(torch.ones(shape, dtype=dtype, device="meta"), mesh, a)
            with counting() as sent:
                x = real.redistribute(placements=b)
            with counting() as dry_run:
                y = meta.redistribute(placements=b)
            assert dry_run.entries == sent.entries, (shape, dtype, a, b)
            assert (y.sharding, y.dtype, y.is_meta) == (x.sharding, x.dtype, True)
            assert [t.shape for t in y.to_local().ranks] == [t.shape for t in x.to_local().ranks]


def test_a_dry_run_of_a_thousand_ranks_is_fast():
    n = 2**16
    with simulate(1024):
        mesh = init_device_mesh("cpu", (32, 32), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.empty(n, n, device="meta"), mesh, [Shard(0), Shard(1)])
        began = time.perf_counter()
        with counting() as gather:
            y = x.redistribute(tp=R)
        with counting() as whole:
            x.redistribute(dp=R, tp=R)
        with counting() as transpose:
            z = x.redistribute(dp=Shard(1), tp=Shard(0))
        with counting() as reduce:
            pending = DTensor.from_local(torch.empty(n, n, device="meta"), mesh, [Partial(), Partial()])
            pending.redistribute(dp=Shard(0), tp=Shard(1))
        assert time.perf_counter() - began < 10  # more than a minute if each rank packed and unpacked
        assert {tuple(b.shape) for b in y.to_local().ranks} == {(n // 32, n)}
        assert {tuple(b.shape) for b in z.to_local().ranks} == {(n // 32, n // 32)}
    block = 4 * n * n // 1024
    assert [(e.step, e.group_size, e.bytes) for e in gather.entries] == [
        ("all-gather", 32, 1024 * 31 * block)
    ]
    assert [(e.step, e.group_size, e.bytes) for e in whole.entries] == [
        ("all-gather", 1024, 1024 * 1023 * block)
    ]
    # ranks on the diagonal keep their block
    assert [(e.group_size, e.bytes) for e in transpose.entries] == [(1024, 992 * block)]
    assert reduce.bytes == 1024 * 1023 * block
    assert whole.collectives == reduce.collectives == 1


# ---- meshes


def test_a_tensor_on_a_sub_mesh_is_on_all_its_siblings():
    with simulate(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        mine = per_rank(lambda rank: grid(4) + 100 * rank)
        x = distribute_tensor(mine, mesh["tp"], [Shard(0)])
        assert x.device_mesh.size() == 3
        # each group of siblings has its own source: ranks 0 and 3
        assert [t.tolist() for t in x.to_local().ranks] == [[0, 1], [2, 3], [], [300, 301], [302, 303], []]
        assert [t[0].item() for t in x.full_tensor().ranks] == [0, 0, 0, 300, 300, 300]
        y = DTensor.from_local(mine, mesh["dp"], [Partial()]).redistribute(dp=R)
        assert [t[0].item() for t in y.to_local().ranks] == [300, 500, 700, 300, 500, 700]
        with counting() as ledger:
            x.redistribute(tp=R)
        assert ledger.bytes == 2 * 4 * 2 * 4  # in both groups, each of four elements is sent to two ranks


def test_a_sub_mesh_of_two_of_three_axes():
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        x = distribute_tensor(grid(3, 3), mesh["pp", "tp"], [Shard(0), Shard(1)])
        assert ["{}x{}".format(*b.shape) for b in x.to_local().ranks] == [
            "2x2",
            "2x1",
            "2x2",
            "2x1",
            "1x2",
            "1x1",
            "1x2",
            "1x1",
        ]
        for whole in x.redistribute(pp=Shard(1), tp=R).full_tensor().ranks:
            assert torch.equal(whole, grid(3, 3))


def test_flattened_axes():
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = mesh._flatten("all")
        x = distribute_tensor(grid(6), flat, [Shard(0)])
        assert repr(x.sharding) == "[6:all]"
        assert [t.tolist() for t in x.to_local().ranks] == [[0, 1], [2, 3], [4, 5], []]
        total = DTensor.from_local(per_rank(lambda rank: torch.tensor([1.0 * rank])), flat, [Partial()])
        assert total.redistribute(all=R).to_local().ranks[2].item() == 6


def test_a_mesh_with_permuted_ranks():
    with simulate(4):
        mesh = sw.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("x", "y"))
        x = distribute_tensor(per_rank(lambda rank: grid(2, 3) + 10 * rank), mesh, [Shard(0), Shard(1)])
        # rank 3 is at coord (0, 0), so it is the source
        assert {r: b.tolist() for r, b in x.to_local()._blocks.items()} == {
            3: [[30, 31]],
            1: [[32]],
            0: [[33, 34]],
            2: [[35]],
        }
        for target in itertools.product((Shard(0), Shard(1), R), repeat=2):
            assert all(
                torch.equal(t, grid(2, 3) + 30) for t in x.redistribute(placements=target).full_tensor().ranks
            )


def test_a_mesh_over_part_of_the_world():
    with simulate(6):
        mesh = sw.DeviceMesh("cpu", [[5, 2], [1, 4]], mesh_dim_names=("x", "y"))
        x = distribute_tensor(grid(5, 3).requires_grad_(), mesh, [Shard(0), Partial()])
        assert x.to_local()._blocks.keys() == {1, 2, 4, 5}
        y = x.redistribute(x=Shard(1), y=Shard(0))
        assert all(torch.equal(t, grid(5, 3)) for t in y.full_tensor().ranks)
        y.to_local().sum().backward()
        assert all(torch.equal(t, torch.ones(5, 3)) for t in x.grad.full_tensor().ranks)
        assert "0:" not in repr(y.to_local())


def test_tensors_on_disjoint_meshes_do_not_mix():
    with simulate(4):
        here, there = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [2, 3])
        x, y = (distribute_tensor(grid(3), mesh, [Shard(0)]) for mesh in (here, there))
        with pytest.raises(NotImplementedError, match="one mesh"):
            x + y
        with pytest.raises(RuntimeError, match=r"(?s)have different ranks.*\n  why: .*\n  fix: "):
            x.to_local() + y.to_local()


def test_axes_of_one_rank():
    with simulate(3):
        mesh = init_device_mesh("cpu", (1, 3, 1), mesh_dim_names=("a", "b", "c"))
        x = distribute_tensor(grid(4), mesh, [Shard(0), Shard(0), Partial()])
        assert repr(x.sharding) == "[4:b]"
        with counting() as ledger:
            x.redistribute(a=R, c=R)
        assert ledger.collectives == 0
        assert x.redistribute(b=R).full_tensor().ranks[2].tolist() == [0, 1, 2, 3]


# ---- SPMD programs


def test_training_by_hand_with_blocks_of_different_sizes():
    """A linear layer whose batch is split unevenly: gradients per rank, summed by a redistribution."""
    data, target = grid(7, 3) / 10, grid(7, 2) / 10
    w = torch.full((3, 2), 0.5, requires_grad=True)
    ((data @ w - target) ** 2).sum().backward()
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        x, y = (distribute_tensor(t, mesh, [Shard(0)]).to_local() for t in (data, target))
        assert [b.shape[0] for b in x.ranks] == [2, 2, 2, 1]
        weight = distribute_tensor(w.detach().clone().requires_grad_(), mesh)
        loss = ((x @ weight.to_local(grad_placements=[Partial()]) - y) ** 2).sum()
        total = DTensor.from_local(loss, mesh, [Partial()]).full_tensor()
        total.backward()
        torch.testing.assert_close(weight.grad.full_tensor().ranks[3], w.grad)
        assert total.ranks[0].item() == pytest.approx(((data @ w - target) ** 2).sum().item())


def test_collectives_of_the_user():
    with simulate(4):
        t = per_rank(lambda rank: torch.tensor([float(rank)]))
        dist.all_reduce(t)
        assert [b.item() for b in t.ranks] == [6, 6, 6, 6]
        with pytest.raises(RuntimeError, match=r"(?s)cannot run on simulated ranks.*\n  why: .*\n  fix: "):
            dist.send(t, 1)


def test_collectives_of_the_user_run_on_all_groups_along_a_mesh_axis():
    with sw.simulate(4):
        mesh = sw.DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("x", "y"))
        t = sw.per_rank(lambda rank: torch.tensor([10.0**rank]))
        torch.distributed.all_reduce(t, group=mesh.get_group("y"))
        assert [b.item() for b in t.ranks] == [1001, 110, 110, 1001]
        t = sw.per_rank(lambda rank: torch.tensor([10.0**rank]))
        torch.distributed.all_reduce(t, group=mesh.get_group("x"))
        assert [b.item() for b in t.ranks] == [11, 11, 1100, 1100]
        t = sw.per_rank(lambda rank: torch.tensor([10.0**rank]))
        torch.distributed.all_reduce(t, group=torch.distributed.new_group([0, 2]))
        assert [b.item() for b in t.ranks] == [101, 10, 101, 1000]


def test_collectives_in_which_each_rank_has_another_role_are_refused_with_the_reason():
    with sw.simulate(2):
        group = sw.init_device_mesh("cpu", (2,)).get_group(0)
        t = sw.per_rank(lambda rank: torch.tensor([10.0**rank] * 2))
        plain = [torch.empty(2), torch.empty(2)]
        error = r"[^|]*\n  why: [^|]*\n  fix: "
        with pytest.raises(RuntimeError, match=r"as its output" + error):
            dist.gather(t, plain)
        with pytest.raises(RuntimeError, match=r"got plain tensors" + error):
            dist.reduce_scatter(plain[0], [t, t])
        with pytest.raises(RuntimeError, match=r"split sizes \[0, 2\]" + error):
            dist.all_to_all_single(torch.empty_like(t), t, [0, 2], [0, 2], group)
        with pytest.raises(RuntimeError, match=r"get_rank\(\) was used as a number" + error):
            funcol.permute_tensor(t, [1, 0], group)
        parts = [torch.empty_like(t) for _ in range(2)]
        dist.gather(t, parts, dst=1)
        assert [p.ranks[1][0].item() for p in parts] == [1, 10]
