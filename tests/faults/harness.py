"""Running scenarios on processes that form one world after the other; `python -m tests.faults.harness` is one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tests.faults.scenarios import SCENARIOS

import shardwise as sw

ROOT = Path(__file__).parents[2]
TIMEOUTS = {"stopped": 2.0}
"""Of the guard, where a scenario needs one; others must not wait for it."""


class Outcome(NamedTuple):
    """What a rank did: the error's type, its kind if it is a PeerError, its text, and the seconds."""

    error: str
    kind: str
    text: str
    seconds: float


def run_on_processes(
    names: list[str], nprocs: int = 4, limit: float = 200.0
) -> dict[str, dict[int, Outcome]]:
    """The outcome of each scenario on each rank that lived to tell; one that kills a rank must be the last."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.faults.harness", folder, str(nprocs)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *names], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
            )
            for rank in range(nprocs)
        ]
        deadline = time.monotonic() + limit
        output = []
        for rank in ranks:
            try:
                output.append(rank.communicate(timeout=max(0.1, deadline - time.monotonic()))[1])
            except subprocess.TimeoutExpired:
                rank.kill()
                output.append(rank.communicate()[1])
        found: dict[str, dict[int, Outcome]] = {name: {} for name in names}
        for file in sorted(Path(folder).glob("*.json")):
            name, rank = file.stem.split("-")
            found[name][int(rank)] = Outcome(*json.loads(file.read_text()))
        if not any(found.values()):
            raise RuntimeError("".join(output))
        return found


def main(folder: str, nprocs: int, rank: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for i, name in enumerate(names):
        store = dist.FileStore(f"{folder}/store{i}", nprocs)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs)
        dist.barrier()
        outcome = attempt(name)
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(outcome))
        dist.destroy_process_group()
    os._exit(0)


def attempt(name: str) -> Outcome:
    start, error, kind, text = time.monotonic(), "", "", ""
    try:
        with sw.guard(timeout=TIMEOUTS.get(name, 120.0)):
            SCENARIOS[name][0]()
    except BaseException as raised:
        error, kind, text = type(raised).__name__, getattr(raised, "kind", ""), str(raised)
    return Outcome(error, kind, text, time.monotonic() - start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
