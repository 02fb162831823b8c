"""A fault on one rank is one error on all of them, soon, that names the rank; what is no fault breaks nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch.distributed as dist
from tests.faults.forked_world import run_world
from tests.faults.harness import ROOT, run_on_processes
from tests.faults.scenarios import BAD, SCENARIOS, alike, caught_alone

import shardwise as sw
from shardwise.faults.diagnose import World
from shardwise.faults.error import Fault, PeerError
from shardwise.faults.record import OwnRecord, Record

pytestmark = pytest.mark.processes
LATEST = 30.0  # on a machine that does other things; `make faults` asks for 2 seconds


@pytest.fixture(scope="module")
def outcomes():
    return run_on_processes(list(SCENARIOS))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_on_one_rank_is_one_error_on_all_others(name, outcomes):
    expected, found = SCENARIOS[name][1], outcomes[name]
    assert set(found) == set(range(4)) - ({BAD} if name == "killed" else set())
    if name != "killed":
        assert found[BAD].error == expected.own
    others = [found[rank] for rank in (0, 1, 3)]
    assert {o.error for o in others} == {"PeerError"}, [o.text for o in others]
    assert {o.kind for o in others} == {expected.kind}
    assert len({o.text for o in others}) == 1
    text = others[0].text
    assert re.match(rf"ranks? [\d and]*\b{BAD}\b", text)
    assert expected.says in text
    assert "scenarios.py:" in text
    assert max(o.seconds for o in others) < LATEST


def test_errors_that_all_ranks_raise_break_nothing(workers):
    first, *others = workers.run(alike)
    assert first == ["RuntimeError", "RuntimeError", "IndexError"]
    assert all(found == first for found in others)
    assert workers.run(caught_alone) == [496.0] * 4


def leave_before_others_join(injected):
    if dist.get_rank() == 0:
        time.sleep(0.3)
    with sw.guard(timeout=20):
        if dist.get_rank() == 0:
            dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_leaves_before_others_join_is_named():
    outcome = run_world(leave_before_others_join, 2, limit=20)
    assert outcome.ranks[1].end == "returned"
    assert re.match("rank 1 of 2 (left the process group|has returned)", outcome.ranks[0].text)


def raise_alike():
    raise KeyError("on all ranks")


def process_id():
    return os.getpid()


def test_workers_that_raise_alike_are_used_again(workers):
    before = workers.run(process_id)
    with pytest.raises(sw.LaunchError, match="so did every other rank"):
        workers.run(raise_alike)
    assert workers.run(process_id) == before


PROGRAM = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    if dist.get_rank() == 1:
        raise KeyError("one rank only")
    x.sum().item()
"""


def test_a_program_that_is_run_with_torchrun_is_guarded(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = 20000 + os.getpid() % 20000
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "shardwise", "run", str(program)],
            env=env
            | {"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert "shardwise.faults.error.PeerError: rank 1 of 2 failed" in errors[0]
    assert "train.py:10 in <module>" in errors[0]
    assert "KeyError: 'one rank only'" in errors[0]
    assert "PeerError" not in errors[1]


def test_a_record_keeps_the_last_collectives(tmp_path):
    path = str(tmp_path / "rank0")
    own = OwnRecord(0, path)
    rows = [own.add_row(f"group{i}", (0, 1)) for i in range(3)]
    for i in range(100):
        own.begin(rows[i % 3], f"collective {i}" + "x" * (i * 10), i, (f"file{i}.py", i, "f"))
    read = Record(0, path)
    entries = read.entries()
    assert [e.number for e in entries] == list(range(69, 101))
    assert all(e.text.startswith(f"collective {e.number - 1}x") for e in entries)
    assert entries[-1].source == "file99.py:99 in f"
    assert read.count_of(rows[0].key) == 34
    assert read.process() == "runs"
    assert read.waits() == 0.0
    world = World(2, own, {0: own, 1: read}, frozenset())
    assert world.elsewhere == []
    own.post_error("é" * 5000)
    assert read.error().endswith("...")
    many = [own.add_row(f"more{i}", (0, 1)) for i in range(64)]
    assert own.holds(many[-1])
    assert not own.holds(rows[0])


def test_guard_checks_its_timeout():
    with pytest.raises(ValueError, match="timeout is 0"):
        sw.guard(timeout=0)


def test_a_peer_error_can_be_sent_to_another_process():
    fault = Fault("died", (2,), "rank 2 died")
    kind, args = PeerError(fault).__reduce__()
    assert kind(*args).fault == fault
    assert kind(*args).ranks == (2,)


def guarded_calls():
    calls = []

    @sw.guard()
    def call(x):
        calls.append(dist.get_rank())
        return x + 1

    return call(1) + call(2), len(calls)


def test_guard_decorates(workers):
    assert workers.run(guarded_calls) == [(5, 2)] * 4
