"""A training run that is killed at drawn moments and resumed on other meshes and plans must have the losses of an uninterrupted one.

python -m tests.checkpoint.chaos --kills 300        forks the ranks, so that starting them costs little
python -m tests.checkpoint.chaos --torchrun 3       restarts by torchrun
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.metadata import checkpoint_number, complete_in
from shardwise.parallel import DataParallelMeshDims, fully_shard, parallelize_module

STEPS, EVERY, BATCH, WIDTH = 24, 2, 12, 8
PLACES = [
    ((1,), "fsdp"),
    ((2,), "fsdp"),
    ((3,), "fsdp"),
    ((4,), "fsdp"),
    ((2,), "tp"),
    ((3,), "tp"),
    ((4,), "tp"),
    ((2, 2), "fsdp x tp"),
]
MOMENTS = ["write", "pwrite", "fsync", "rename", "step", "step", "time", "time"]
"""Calls of the operating system before or after which a rank dies, a point in a step, or any time at all."""


class Net(nn.Module):
    """Two layers with dropout, in float64 so that the order of sums does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12, dtype=torch.float64)
        self.down = nn.Linear(12, WIDTH, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.3))


def build(shape: tuple[int, ...], plan: str) -> tuple[nn.Module, Any]:
    """The model by a plan, and what lays out the batch."""
    net = Net()
    with torch.no_grad():  # weights that nobody draws
        for p in net.parameters():
            p.copy_(torch.sin(torch.arange(1, p.numel() + 1, dtype=p.dtype) ** 1.3).view(p.shape) * 0.5)
    if not shape:
        return net, lambda x: x
    names = ("dp", "tp") if len(shape) == 2 else ("tp",) if plan == "tp" else ("dp",)
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in plan:
        parallelize_module(net, mesh["tp"] if len(shape) == 2 else mesh, {"up": "colwise", "down": "rowwise"})
    if "fsdp" in plan:
        fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    split = [sw.Shard(0) if name == "dp" else sw.Replicate() for name in names]
    return net, lambda x: sw.distribute_tensor(x, mesh, split, src_data_rank=None)


def whole(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, sw.DTensor) else x.detach()


def train(
    path: Path, shape: tuple[int, ...], plan: str, log: Path | None, in_step: Any = lambda: None
) -> list[Any]:
    """Train from the newest checkpoint to the last step; the losses and masks by step."""
    net, split = build(shape, plan)
    sw.manual_seed(5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    state = {"model": net, "optimizer": optimizer, "schedule": schedule, "position": 0}
    out: list[Any] = []

    def note(*entry: Any) -> None:
        out.append(entry)
        if log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    with checkpoint.CheckpointManager(path, keep=2, every=EVERY) as manager:
        note("resumed", manager.load(state) or 0)
        while state["position"] < STEPS:
            step = state["position"]
            numbers = torch.arange(BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)
            data = torch.sin(numbers * (step + 1)) * 2
            mask = F.dropout(split(torch.ones(BATCH, WIDTH, dtype=torch.float64)), 0.5)
            loss = (net(split(data)) - split(data)).pow(2).mean()
            loss.backward()
            in_step()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            digest = hashlib.sha256(whole(mask).numpy().tobytes()).hexdigest()[:16]
            note(step, whole(loss).item(), digest)
            state["position"] = step + 1
            manager.save_if_due(state, step + 1)
    return out


def reference() -> dict[int, tuple[float, str]]:
    """The losses and masks of a run on one device without checkpoints."""
    with tempfile.TemporaryDirectory() as path, sw.one_device():
        return {step: (loss, mask) for step, loss, mask in train(Path(path), (), "", None)[1:]}


# ---- one life of the ranks, as forks of this process


def child(
    rank: int,
    shape: tuple[int, ...],
    plan: str,
    path: Path,
    log: Path,
    store: Path,
    death: tuple[str, int] | None,
) -> None:
    """A rank: it ends by `os._exit`, or dies at the moment that it is given."""
    code = 1
    try:
        torch.set_num_threads(1)
        size = math.prod(shape)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        train(path, shape, plan, log, arrange_death(death))
        code = 0
    except BaseException:
        (log.parent / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def arrange_death(death: tuple[str, int] | None) -> Any:
    """Let this process kill itself at the n-th call of a function of os; returns what is called in each step."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if death is not None and calls[0] == death[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    if death is not None and hasattr(os, death[0]):
        real = getattr(os, death[0])

        def call(*args: Any, **kwargs: Any) -> Any:
            count()  # before it
            result = real(*args, **kwargs)
            count()  # after it
            return result

        setattr(os, death[0], call)
    return count if death is not None and death[0] == "step" else lambda: None


def live(rng: random.Random, work: Path, number: int) -> tuple[bool, str]:
    """Start ranks on a drawn mesh, kill them at a drawn moment or let them finish; whether they finished."""
    shape, plan = rng.choice(PLACES)
    size, moment = math.prod(shape), rng.choice(MOMENTS)
    victim = 0 if moment in ("rename",) else rng.randrange(size)
    death = None if moment == "time" else (moment, rng.randrange(1, 10 if moment == "step" else 14))
    store = work / f"store-{number}"
    (work / "checkpoints").mkdir(exist_ok=True)
    before = [checkpoint_number(p) or 0 for p in complete_in(work / "checkpoints")]
    log = work / "log"
    known = len(log.read_text().splitlines()) if log.exists() else 0
    pids: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            child(rank, shape, plan, work / "checkpoints", log, store, death if rank == victim else None)
        pids[pid] = rank
    end = time.monotonic() + (rng.uniform(0.05, 1.5) if moment == "time" else 60)
    finished = wait_for(pids, end)
    store.unlink(missing_ok=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()[known:]] if log.exists() else []
    if lines:
        last = max(before, default=0)
        assert lines[0] == ["resumed", last], f"resumed at {lines[0]}, but {last} was complete"
    return finished, f"{plan} on {shape}, {moment} of rank {victim}"


def wait_for(pids: dict[int, int], end: float) -> bool:
    """Wait for forks; when one dies or the time is over, kill the others. Whether all ended well."""
    left, well = set(pids), True
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                well = well and status == 0
        if left and (not well or time.monotonic() > end):
            well = False
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            left.clear()
        time.sleep(0.003)
    return well


def check(work: Path, expected: dict[int, tuple[float, str]]) -> int:
    """Every checkpoint that is there can be read, and every step that was made is that of the reference."""
    for path in complete_in(work / "checkpoints"):
        assert checkpoint.load(path, random=False)["position"] == checkpoint_number(path)
    count = 0
    for line in (work / "log").read_text().splitlines() if (work / "log").exists() else []:
        first, *rest = json.loads(line)
        if first != "resumed":
            loss, mask = expected[first]
            assert rest[1] == mask, f"step {first}: another mask"
            assert abs(rest[0] - loss) <= 1e-6 * abs(loss), f"step {first}: loss {rest[0]}, not {loss}"
            count += 1
    return count


def chaos(kills: int, seed: int, verbose: bool = False) -> dict[str, int]:
    """Kill runs until they have been killed often enough, and finish the last one."""
    rng, expected = random.Random(seed), reference()
    found = {"kills": 0, "runs": 0, "lives": 0, "steps": 0}
    while found["kills"] < kills:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
            work, finished = Path(name), False
            while not finished:
                finished, what = live(rng, work, found["lives"])
                errors = [p.read_text() for p in work.glob("error-*")]
                strange = [
                    e
                    for e in errors
                    if "Error" in e and "Connection" not in e and "gloo" not in e and "peer" not in e
                ]
                if finished or strange:
                    assert not strange, strange[0]
                for p in work.glob("error-*"):
                    p.unlink()
                found["lives"] += 1
                found["kills"] += not finished
                steps = check(work, expected)
                if verbose:
                    print(
                        f"{found['kills']:4} {'finished' if finished else 'killed  '} {what}, {steps} steps",
                        flush=True,
                    )
            assert {json.loads(x)[0] for x in (work / "log").read_text().splitlines()} >= set(range(STEPS))
            found["steps"] += steps
            found["runs"] += 1
    return found


# ---- under torchrun


def worker() -> None:
    """A rank that torchrun has started: another plan at each restart, and a death in each life but the last."""
    restart, most = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["CHAOS_RESTARTS"])
    work, rng = Path(os.environ["CHAOS_WORK"]), random.Random(f"{os.environ['CHAOS_SEED']} {restart}")
    torch.set_num_threads(1)
    shape, plan = rng.choice([p for p in PLACES if math.prod(p[0]) == int(os.environ["WORLD_SIZE"])])
    moment = (rng.choice(["write", "fsync", "rename", "step"]), rng.randrange(2, 9))
    size = int(os.environ["WORLD_SIZE"])
    victim = 0 if moment[0] == "rename" else rng.randrange(size)
    death = arrange_death(moment if restart < most and int(os.environ["RANK"]) == victim else None)
    # launch, because torchrun keeps its store: init_process_group would find the addresses of ranks that are gone
    sw.launch(train, size, work / "checkpoints", shape, plan, work / "log", death)
    sys.stdout.flush()
    os._exit(
        0
    )  # three times a rank that had finished aborted at its exit under torchrun; the cause is not known


def under_torchrun(restarts: int, ranks: int, seed: int) -> int:
    """A run that torchrun restarts after each death; the number of steps made."""
    expected = reference()
    with tempfile.TemporaryDirectory() as name:
        environment = {
            **os.environ,
            "CHAOS_WORK": name,
            "CHAOS_RESTARTS": str(restarts),
            "CHAOS_SEED": str(seed),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}", f"--nproc-per-node={ranks}",
                   "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1", "-m", "tests.checkpoint.chaos", "--worker"]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(x) for x in (Path(name) / "log").read_text().splitlines()]
        assert {x[0] for x in lines} >= set(range(STEPS))
        return check(Path(name), expected)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--torchrun", type=int, default=0, help="runs under torchrun, each restarted three times"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker()
        return
    torch.set_num_threads(1)
    start = time.monotonic()
    if given.kills:
        found = chaos(given.kills, given.seed, given.verbose)
        print(json.dumps(found), f"{time.monotonic() - start:.1f} s")
    for run in range(given.torchrun):
        steps = under_torchrun(3, 2 + run % 3, given.seed + run)
        print(f"torchrun with {2 + run % 3} ranks, 3 deaths: {steps} steps, {time.monotonic() - start:.1f} s")
    shutil.rmtree(Path(tempfile.gettempdir()) / "chaos", ignore_errors=True)


if __name__ == "__main__":
    main()
