"""Ranks that are left go on from memory: with the bits of a planned redistribution, and the losses of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.recovery.training import MOMENTS, Death, train, uninterrupted

import shardwise as sw
from shardwise import checkpoint
from shardwise.recovery import ElasticError, ElasticRun, StateLostError
from shardwise.recovery.snapshot import Snapshot, describe

pytestmark = pytest.mark.processes
DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
LATEST = 30.0  # on a machine that does other things; `make elastic` asks for 3 seconds


@pytest.fixture(scope="module")
def expected():
    return uninterrupted()


def drawn_deaths(rng: random.Random, count: int) -> list[Death]:
    """Members that die one after the other."""
    members = rng.sample(range(4), count)
    return [
        Death(m, rng.choice(MOMENTS[:5] if i == 0 else MOMENTS), rng.randrange(1, 6) if i == 0 else 1 + 2 * i)
        for i, m in enumerate(members)
    ]


def check(found, deaths, work, expected) -> float:
    """All that is left ended with the right losses; the longest time from a death to the end of the next step."""
    assert all(found[d.member] is None for d in deaths if (work / f"killed-{d.member}").exists())
    left = [f for f in found if f is not None]
    assert left
    for each in left:
        assert each["wrong"] == []
        for step, (loss, mask) in each["losses"].items():
            assert mask == expected[step][1]
            assert abs(loss - expected[step][0]) <= 1e-6 * abs(expected[step][0])
        assert max(each["losses"]) == len(expected) - 1
    last = max((float(p.read_text()) for p in work.glob("killed-*")), default=None)
    return 0.0 if last is None or left[0]["generation"] == 0 else max(f["done"] for f in left) - last


CASES = [
    ([Death(3, "update", 3)], 1),
    ([Death(0, "commit", 4)], 1),
    ([Death(0, "copy", 5), Death(2, "update", 6)], 2),
    *((("drawn", seed), 2) for seed in range(24 if DEEP else 1)),
]


@pytest.mark.parametrize(("deaths", "copies"), CASES, ids=str)
def test_the_ranks_that_are_left_go_on(tmp_path, expected, deaths, copies):
    if deaths[0] == "drawn":
        rng = random.Random(f"{deaths[1]} {os.environ.get('SHARDWISE_ELASTIC_SEED', '')}")
        deaths = drawn_deaths(rng, rng.randrange(1, 4))
    found = sw.elastic(train, 4, tmp_path, deaths, copies=copies)
    assert (tmp_path / f"killed-{deaths[0].member}").exists()
    assert check(found, deaths, tmp_path, expected) < LATEST


def lose_state(run: ElasticRun, path: Path):
    """FSDP without copies: what a rank held is lost, and the last checkpoint is loaded."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)], src_data_rank=None)
    state = {"x": x, "step": 0}
    said = None
    try:
        run.restore(state)
    except StateLostError as error:
        said = error.names, str(error)
        checkpoint.load(checkpoint.latest(path), into=state)
    while state["step"] < 4:
        with torch.no_grad():
            x += 1
        x.sum().item()
        state["step"] += 1
        if state["step"] == 2 and run.generation == 0:
            checkpoint.save(state, path / "step-2")
        if state["step"] == 3 and dist.get_rank() == 1 and run.generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        run.commit(state)
    return said, x.full_tensor().tolist(), run.lost


def test_state_that_is_lost_is_named_and_a_checkpoint_can_be_loaded(tmp_path):
    first, second, third = sw.elastic(lose_state, 3, tmp_path)
    assert second is None
    assert first == third
    (names, text), values, lost = first
    assert names == ("x",)
    assert "x [6:dp]" in text
    assert "checkpoint.load" in text
    assert values == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert lost == (1,)


def raise_alone(run: ElasticRun):
    run.commit({"step": dist.get_rank() // 5})
    if dist.get_rank() == 1:
        raise KeyError("a bug")
    run.commit({"step": 1})


def commit_differently(run: ElasticRun):
    run.commit({"step": dist.get_rank()})


def too_few(run: ElasticRun):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.commit({})


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raise_alone, "KeyError: 'a bug'"),
        (commit_differently, "different keys"),
        (too_few, "1 of 2 ranks are left"),
    ],
    ids=["raises", "differs", "too few"],
)
def test_errors_of_the_program_end_the_run(function, text):
    with pytest.raises(sw.LaunchError, match=text):
        sw.elastic(function, 2, min_ranks=2)


@pytest.mark.parametrize("arguments", [{"min_ranks": 0}, {"min_ranks": 3}, {"timeout": 0}, {"copies": 3}])
def test_arguments_are_checked(arguments):
    with pytest.raises(ElasticError, match="nprocs=2"):
        sw.elastic(too_few, 2, **arguments)
    with sw.simulate(2), pytest.raises(ElasticError, match="inside simulate"):
        sw.elastic(too_few, 2)


PROGRAM = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    import shardwise as sw

    def train(run):
        mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        state = {"x": sw.distribute_tensor(torch.zeros(2, 3), mesh, [sw.Replicate()]), "step": 0}
        run.restore(state)
        while state["step"] < 5:
            state["x"] += 1
            state["x"].sum().item()
            state["step"] += 1
            if state["step"] == 3 and run.members[dist.get_rank()] in map(int, sys.argv[1]):
                if run.generation == 0:
                    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
            run.commit(state)
        return run.members, state["x"].full_tensor().sum().item()

    dist.init_process_group("gloo")
    with sw.guard(timeout=2.0):
        print(sw.elastic(train, int(os.environ["WORLD_SIZE"])), flush=True)
"""


def start_ranks(count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Processes as a launcher starts them that does not end all of them when one dies: rank 0 serves the store."""
    port = str(random.randrange(20000, 60000))
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def test_processes_of_another_launcher_survive_rank_0_and_its_store():
    ranks = start_ranks(3, "0", "SIGKILL")
    out = [p.communicate(timeout=120) for p in ranks]
    assert [p.returncode for p in ranks] == [-signal.SIGKILL, 0, 0], out
    for text, _ in out[1:]:
        assert text.strip() == "[None, ((1, 2), 30.0), ((1, 2), 30.0)]"


def test_a_rank_that_was_stopped_is_left_behind_and_says_so():
    ranks = start_ranks(3, "2", "SIGSTOP")
    out = [p.communicate(timeout=120) for p in ranks[:2]]
    assert [p.returncode for p in ranks[:2]] == [0, 0], out
    assert out[0][0].strip() == "[((0, 1), 30.0), ((0, 1), 30.0), None]"
    time.sleep(0.1)
    ranks[2].send_signal(signal.SIGCONT)
    _, error = ranks[2].communicate(timeout=120)
    assert ranks[2].returncode == 1
    assert "Error" in error


def snapshots(shape, placements, copies):
    """The snapshots that the ranks of a mesh would make of a tensor, made in a simulation."""
    with sw.simulate(int(np.prod(shape))):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        x = sw.distribute_tensor(torch.arange(35.0).view(7, 5), mesh, placements)
        members = tuple(range(int(np.prod(shape))))
        return [describe({"x": x, "y": torch.ones(2)}, 1, members, rank, copies) for rank in members]


@pytest.mark.parametrize(
    ("shape", "placements", "copies", "without", "lost"),
    [
        ((2, 2), [sw.Replicate(), sw.Shard(0)], 1, [1], []),
        ((2, 2), [sw.Replicate(), sw.Shard(0)], 1, [1, 3], ["x"]),
        ((2, 2), [sw.Shard(0), sw.Shard(1)], 1, [2], ["x"]),
        ((2, 2), [sw.Shard(0), sw.Shard(1)], 2, [2], []),
        ((2, 2), [sw.Shard(0), sw.Shard(1)], 2, [2, 3], []),
        ((2, 2), [sw.Shard(0), sw.Shard(1)], 2, [0, 2], ["x"]),
        ((3,), [sw.Shard(0)], 2, [1], []),
        ((3,), [sw.Replicate()], 1, [0, 1], []),
    ],
)
def test_what_is_lost_with_which_ranks(shape, placements, copies, without, lost):
    snapshot: Snapshot = snapshots(shape, placements, copies)[0][0]
    left = [m for m in snapshot.members if m not in without]
    assert snapshot.lost_without(left) == lost
