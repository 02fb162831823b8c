"""Drawn faults, programs that call torch.distributed, and right programs, on processes: a part of what `make faults` runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.faults.forked_world import RankOutcome, WorldOutcome
from tests.faults.harness import ROOT
from tests.faults.injected import KINDS, MODELS, POINTS, Injected, draw_faults
from tests.faults.run import classify, verdict

CALLS = [
    "groups",
    "pairs",
    "nested",
    "skips barrier",
    "stops before DDP",
    "raises before new_group",
    "dies before recv",
]


@pytest.mark.processes
def test_drawn_faults_are_named_and_right_programs_raise_no_alarm():
    """A process of its own: it forks the ranks, which a process with threads should not do."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    sizes = ["--faults", "15", "--programs", "20", "--values", "4", "--calls", *CALLS, "--bound", "30"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", *sizes], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shardwise: {'named': 15}" in done.stdout
    assert "right programs: 20, alarms: 0" in done.stdout


def test_every_kind_of_fault_is_drawn():
    faults = draw_faults(100)
    assert {f.kind for f in faults} == set(KINDS)
    assert {f.point for f in faults} == set(POINTS)
    assert {f.model for f in faults} == set(MODELS)
    assert len(set(faults)) == 100


FAULT = Injected("exception", 2, "loss", 0, "ops", 0)
TEXT = "rank 2 of 4 failed\n  why: a reason.\n  fix: a way."


def world(**changes: RankOutcome) -> WorldOutcome:
    ranks = {r: RankOutcome("raised", "PeerError", TEXT, 0.4) for r in (0, 1, 3)}
    ranks[2] = RankOutcome("raised", "ValueError", "a bad sample", 0.0)
    return WorldOutcome(ranks | {int(name[1:]): outcome for name, outcome in changes.items()}, True)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (RankOutcome("hung", "", "", 0.0), "without an alarm"),
        (RankOutcome("died", "", "exit code -6", 0.0), "without an alarm"),
        (RankOutcome("returned", "", "", 0.0), "without an alarm"),
        (RankOutcome("raised", "RuntimeError", "Connection closed by peer", 0.1), "without an alarm"),
        (RankOutcome("raised", "PeerError", "rank 1 of 4 failed", 0.1), "different texts"),
        (RankOutcome("raised", "PeerError", TEXT, 2.5), "took 2.5 s"),
    ],
)
def test_a_fault_that_does_not_end_as_it_should_is_reported(changed, says):
    assert verdict(FAULT, world()) == ""
    assert says in verdict(FAULT, world(_1=changed))
    assert verdict(FAULT, world()._replace(injected=False)) == "was not injected"


def test_how_torch_ends_is_the_worst_of_its_ranks():
    assert classify(FAULT, world()) == "named"
    assert classify(FAULT, world(_1=RankOutcome("hung", "", "", 0.0))) == "hang"
    assert classify(FAULT, world(_0=RankOutcome("died", "", "", 0.0))) == "abort"
    assert (
        classify(FAULT, world(_0=RankOutcome("raised", "RuntimeError", "Connection reset", 0.0)))
        == "misleading error"
    )
    silent = {f"_{r}": RankOutcome("returned", "", "", 0.0) for r in range(4)}
    assert classify(FAULT, world(**silent)) == "silent"
