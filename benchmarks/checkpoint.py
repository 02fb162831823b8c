"""The time to save and load a state, relative to torch.distributed.checkpoint: interleaved on the same ranks, median of several rounds.

The state is split over rows; it is loaded into columns, so that every rank reads parts of every file. "async" is the time for which
the call blocks the program. Both write to the same disk and wait until the data is on it.

python -m benchmarks.checkpoint --ranks 2 --megabytes 256
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import tensor as torch_tensor

import shardwise as sw
from shardwise import checkpoint

__all__ = ["CASES", "measure"]

CASES = ("save", "load", "async")
BOUNDS = {"save": 0.8, "load": 0.7, "async": 0.5}
_TENSORS = 32


def _states(package: Any, megabytes: int, dim: int, fill: bool) -> dict[str, Any]:
    """Tensors of equal size, split over all ranks along a dim."""
    mesh = package.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(megabytes * 2**20 // 4 // _TENSORS // 1024, 1)
    out = {}
    for i in range(_TENSORS):
        full = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024).mul_(i + 1)
        x = full if fill else torch.zeros_like(full)
        out[f"layers.{i}.weight"] = package.distribute_tensor(x, mesh, [package.Shard(dim)])
    return out


def _timed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """The time until all ranks have returned, and the result."""
    dist.barrier()
    begin = time.perf_counter()
    out = run(*args, **kwargs)
    own = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.item(), out


def measure(folder: str, megabytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each case the seconds of ours and of torch's, by round; on every rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours, theirs = _states(sw, megabytes, 0, True), _states(torch_tensor, megabytes, 0, True)
    into = _states(sw, megabytes, 1, False)
    into_theirs = _states(torch_tensor, megabytes, 1, False)
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    group = dist.new_group(backend="gloo")  # of torch's background save
    for number in range(rounds + 1):  # the first one is not counted
        a, b = Path(folder) / f"ours-{number}", Path(folder) / f"theirs-{number}"
        save = _timed(checkpoint.save, ours, a)[0], _timed(dcp.save, theirs, checkpoint_id=b)[0]
        load = _timed(checkpoint.load, a, into=into)[0], _timed(dcp.load, into_theirs, checkpoint_id=b)[0]
        if not all(torch.equal(into[k].to_local(), into_theirs[k].to_local()) for k in into):
            raise AssertionError("ours and torch's have loaded different values")
        c, d = Path(folder) / f"async-{number}", Path(folder) / f"async-theirs-{number}"
        first, handle = _timed(checkpoint.async_save, ours, c)
        handle.wait()
        second, future = _timed(dcp.async_save, theirs, checkpoint_id=d, process_group=group)
        future.result()
        dist.barrier()
        for case, pair in zip(CASES, (save, load, (first, second)), strict=True):
            if number:
                found[case].append(pair)
        if dist.get_rank() == 0:
            for path in (a, b, c, d):
                shutil.rmtree(path)
    return found


def main() -> None:
    """Print a line per case, and fail if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, *_ = sw.launch(measure, given.ranks, folder, given.megabytes, given.rounds)
    print(f"{given.megabytes} MB on {given.ranks} ranks")
    print(f"{'':8}{'ours':>10}{'torch':>10}{'ratio':>8}{'bound':>8}")
    worst = []
    for case, pairs in found.items():
        ours, theirs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(f"{case:8}{1e3 * ours:8.1f}ms{1e3 * theirs:8.1f}ms{ours / theirs:8.2f}{BOUNDS[case]:8.2f}")
        if ours > BOUNDS[case] * theirs:
            worst.append(case)
    if worst:
        sys.exit(f"above the bound: {', '.join(worst)}")


if __name__ == "__main__":
    main()
