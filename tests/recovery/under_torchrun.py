"""A rank of an elastic run under torchrun, which dies at a drawn moment in each life but the last.

torchrun --max-restarts=2 --nproc-per-node=2 -m tests.recovery.under_torchrun FOLDER SEED
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.checkpoint.chaos import arrange_death
from tests.recovery.training import STEPS, build, one_step

import shardwise as sw
from shardwise.recovery import ElasticRun

MOMENTS = ["forward", "backward", "update", "write", "pwrite", "fsync", "rename"]


def train(run: ElasticRun, work: Path, seed: int) -> list[Any]:
    """Train to the last step; what rank 0 does is noted."""
    rng = random.Random(f"{seed} {run.generation}")
    ranks, last = dist.get_world_size(), int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    moment, count = rng.choice(MOMENTS), rng.randrange(1, 4)
    is_call = hasattr(os, moment)
    victim = 0 if moment == "rename" else rng.randrange(ranks)
    dies = run.generation < last and dist.get_rank() == victim
    die = arrange_death((moment if is_call else "step", count) if dies else None)

    def note(*entry: Any) -> None:
        if dist.get_rank() == 0:
            with (work / "log").open("a") as file:
                file.write(json.dumps([*entry, time.time()]) + "\n")

    state, split = build(rng.choice([(ranks, 1), (1, ranks)]))
    note("start", run.generation, f"{moment} {count} of rank {victim}")
    note("restored", state["step"] if run.restore(state) else None)
    while state["step"] < STEPS:
        loss, mask = one_step(state, split, lambda here: die() if here == moment else None)
        note("step", state["step"] - 1, loss, mask)
        run.commit(state)
        note("committed", state["step"])
    return [dist.get_rank(), state["step"]]


def main() -> None:
    """Run, and check the result that every rank gets."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    found = sw.elastic(train, ranks, Path(sys.argv[1]), int(sys.argv[2]), folder=folder)
    if found != [[rank, STEPS] for rank in range(ranks)]:
        raise SystemExit(f"the result was {found}")


if __name__ == "__main__":
    main()
