"""Ranks that are left go on from memory: with the bits of a planned redistribution, and the losses of an uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.recovery.kills import check, drawn_deaths, forked
from tests.recovery.training import Death, train, uninterrupted

import shardwise as sw
from shardwise import checkpoint
from shardwise.recovery import ElasticError, ElasticRun, StateLostError, snapshot
from shardwise.recovery.snapshot import Snapshot, describe

pytestmark = pytest.mark.processes
DEEP = os.environ.get("SHARDWISE_DEEP") == "1"
LATEST = 30.0  # on a machine that does other things; `make chaos` asks for 3 seconds


@pytest.fixture(scope="module")
def expected():
    return uninterrupted()


CASES = [
    ([Death(3, "update", 3)], 1),
    ([Death(0, "commit", 4)], 1),
    ([Death(0, "copy", 5), Death(2, "update", 6)], 2),
    *((("drawn", seed), 2) for seed in range(40 if DEEP else 6)),
]


@pytest.mark.parametrize(("deaths", "copies"), CASES, ids=str)
def test_the_ranks_that_are_left_go_on(tmp_path, expected, deaths, copies):
    if deaths[0] == "drawn":
        rng = random.Random(f"{deaths[1]} {os.environ.get('SHARDWISE_ELASTIC_SEED', '')}")
        deaths = drawn_deaths(rng, rng.randrange(1, 4))
    found = sw.elastic(forked(train), 4, tmp_path, deaths, copies=copies)
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
    first, second, third = sw.elastic(forked(lose_state), 3, tmp_path)
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
        sw.elastic(forked(function), 2, min_ranks=2)


@pytest.mark.parametrize("arguments", [{"min_ranks": 0}, {"min_ranks": 3}, {"timeout": 0}, {"copies": 3}])
def test_arguments_are_checked(arguments):
    with pytest.raises(ElasticError, match="nprocs=2"):
        sw.elastic(too_few, 2, **arguments)
    with sw.simulate(2), pytest.raises(ElasticError, match="inside simulate"):
        sw.elastic(too_few, 2)


def count_to_five(run: ElasticRun, victim: int, name: str):
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    state = {"x": sw.distribute_tensor(torch.zeros(2, 3), mesh, [sw.Replicate()]), "step": 0}
    run.restore(state)
    while state["step"] < 5:
        state["x"] += 1
        state["x"].sum().item()
        state["step"] += 1
        if (state["step"], run.generation, run.members[dist.get_rank()]) == (3, 0, victim):
            os.kill(os.getpid(), getattr(signal, name))
        run.commit(state)
    return run.members, state["x"].full_tensor().sum().item()


def rank_of_a_launcher(rank: int, count: int, port: int, work: Path, *args: object) -> None:
    """A rank as a launcher starts it: rank 0 serves the store."""
    torch.set_num_threads(1)
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(common, RANK=str(rank))
    try:
        dist.init_process_group("gloo")
        with sw.guard(timeout=2.0):
            (work / f"out-{rank}").write_text(str(sw.elastic(count_to_five, count, *args)))
        os._exit(0)
    except BaseException as error:
        (work / f"out-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def start_ranks(count: int, work: Path, *args: object) -> list[multiprocessing.Process]:
    """Processes of a launcher that does not end all of them when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_of_a_launcher, args=(r, count, port, work, *args)) for r in range(count)
    ]
    for process in ranks:
        process.start()
    return ranks


def test_processes_of_another_launcher_survive_rank_0_and_its_store(tmp_path):
    ranks = start_ranks(3, tmp_path, 0, "SIGKILL")
    for process in ranks:
        process.join(120)
    assert [p.exitcode for p in ranks] == [-signal.SIGKILL, 0, 0]
    for rank in (1, 2):
        assert (tmp_path / f"out-{rank}").read_text() == "[None, ((1, 2), 30.0), ((1, 2), 30.0)]"


def test_a_rank_that_was_stopped_is_left_behind_and_says_so(tmp_path):
    ranks = start_ranks(3, tmp_path, 2, "SIGSTOP")
    for process in ranks[:2]:
        process.join(120)
    assert [p.exitcode for p in ranks[:2]] == [0, 0]
    assert (tmp_path / "out-0").read_text() == "[((0, 1), 30.0), ((0, 1), 30.0), None]"
    os.kill(ranks[2].pid, signal.SIGCONT)
    ranks[2].join(120)
    assert ranks[2].exitcode == 1
    assert "LeftBehindError" in (tmp_path / "out-2").read_text()


def copy_slowly(run: ElasticRun):
    """Rank 0 dies when all have arrived at a commit, which rank 1 takes long to copy."""
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    state = {"x": sw.distribute_tensor(torch.zeros(2, 3), mesh, [sw.Replicate()]), "step": 0}
    run.restore(state)
    real, member = snapshot.block_on, run.members[dist.get_rank()]

    def slow(*args):
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            time.sleep(0.01)
        return real(*args)

    while state["step"] < 5:
        state["x"] += 1
        state["step"] += 1
        if (run.generation, state["step"], member) == (0, 3, 0):
            Snapshot.copy_blocks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if (run.generation, state["step"], member) == (0, 3, 1):
            snapshot.block_on = slow
        run.commit(state)
        snapshot.block_on = real
    return state["x"].full_tensor().sum().item()


def test_a_copy_is_not_interrupted_when_another_rank_dies():
    assert sw.elastic(forked(copy_slowly), 3) == [None, 30.0, 30.0]


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


@pytest.mark.parametrize("seed", range(8 if DEEP else 1))
def test_commits_outlive_the_processes_that_torchrun_restarts(tmp_path, expected, seed):
    restarts, ranks = 2, 2 + seed % 2
    shared = [str(tmp_path / "shared")] if seed % 2 else []
    command = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", "-m", "tests.recovery.under_torchrun", str(tmp_path), str(seed), *shared]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as agent:
        output, _ = agent.communicate(timeout=240)
    assert agent.returncode == 0, output.decode()
    committed, lives = None, 0
    for kind, *entry, _when in map(json.loads, (tmp_path / "log").read_text().splitlines()):
        if kind == "start":
            lives += 1
        elif kind == "restored":
            # a commit may have been completed just before the rank that notes it died
            assert entry[0] in (committed, (committed or 0) + 1)
        elif kind == "committed":
            committed = entry[0]
        else:
            step, loss, mask = entry
            assert mask == expected[step][1]
            assert abs(loss - expected[step][0]) <= 1e-6 * abs(expected[step][0])
    assert (lives, committed) == (restarts + 1, len(expected))
    assert not list(Path("/dev/shm").glob(f"shardwise-elastic-*-{agent.pid}-*"))
    assert not list(tmp_path.glob("shared/*"))
