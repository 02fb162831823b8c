"""Faults in code of the user that runs inside of ours or of torch reach all ranks, and name the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.faults.harness import ROOT
from tests.faults.user_code import BAD, PROGRAMS

pytestmark = pytest.mark.processes
OWN = {"fail in a background save": "CheckpointError"}  # a save fails alike on all ranks


@pytest.fixture(scope="module")
def outcomes():
    """A process of its own: it forks the ranks, which a process with threads should not do."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.user_code"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_rank_at_fault_is_named_everywhere(outcomes, name):
    others = {int(r): outcome for r, outcome in outcomes[name].items() if int(r) != BAD}
    if "subgroup" in name:  # the other two have finished
        assert [others[r][0] for r in (0, 1)] == ["returned"] * 2
        others = {3: others[3]}
    assert {(end, error) for end, error, *_ in others.values()} == {("raised", OWN.get(name, "PeerError"))}
    (text,) = {text for _, _, text, _ in others.values()}
    assert text.startswith((f"rank {BAD} of 4", f"[rank {BAD}]"))
    assert max(seconds for *_, seconds in others.values()) < 15  # on a machine that does other things
