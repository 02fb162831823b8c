"""Kill anywhere, resume anywhere: the short form of `make chaos`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 60 if os.environ.get("SHARDWISE_DEEP") == "1" else 20


@pytest.mark.processes
def test_runs_that_are_killed_have_the_losses_of_one_that_is_not():
    # a process of its own, which forks the ranks: this one has threads
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.chaos", "--kills", str(KILLS), "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1].rsplit("}", 1)[0] + "}")
    assert found["kills"] >= KILLS
