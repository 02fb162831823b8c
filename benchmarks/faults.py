"""What watching for faults costs: training steps with and without it, alternating in the same two processes.

`guard` is what every program on processes has: each collective is recorded and compared, and a thread looks at the other ranks. The
thread runs in all steps; its share is its CPU time in the measured time, and is added. `sanitize` checks each step, or one in
a hundred: the steps that are not checked, and a hundredth of what a checked one takes more.

python -m benchmarks.faults --ranks 2 --steps 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.faults import watch_world
from shardwise.parallel import fully_shard, parallelize_module
from shardwise.torch_internals.collectives import monitors

__all__ = ["BOUNDS", "SIZES", "measure"]

BOUNDS = {"guard": 1.02, "sanitize": 1.5, "sanitize sampled": 1.05}
SIZES = {"realistic": (256, 4, 8, 64), "small": (32, 2, 4, 8)}
"""Width, layers, batch and sequence."""
PLANS = ("tp", "fsdp")
_EVERY = 100
VARIANTS = ("alone", "guard", "base", "sanitize", "unchecked")


class _Block(nn.Module):
    """A block of a transformer, with attention of 4 heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def _training_step(plan: str, size: str) -> Callable[[], Any]:
    """A function that makes one step of training."""
    width, layers, batch, sequence = SIZES[size]
    torch.manual_seed(0)
    net = nn.Sequential(*[_Block(width) for _ in range(layers)])
    data = torch.randn(batch, sequence, width)
    name = "tp" if plan == "tp" else "dp"
    mesh = sw.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))
    if plan == "tp":
        split = {f"*.{n}": "colwise" for n in ("q", "k", "v", "up")} | {
            f"*.{n}": "rowwise" for n in ("o", "down")
        }
        parallelize_module(net, mesh, split)
        x = sw.distribute_tensor(data, mesh, [sw.Replicate()])
    else:
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        x = sw.distribute_tensor(data, mesh, [sw.Shard(0)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        net(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def _unwatched() -> Iterator[None]:
    kept, monitors[:] = list(monitors), []
    try:
        yield
    finally:
        monitors[:] = kept


class Times(NamedTuple):
    """Seconds of one step: elapsed, and of CPU in all threads of this process."""

    elapsed: float
    cpu: float


def _timed(step: Callable[[], Any]) -> Times:
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    step()
    return Times(time.perf_counter() - begin, time.process_time() - used)


def measure(plan: str, size: str, steps: int) -> tuple[dict[str, list[Times]], float]:
    """The times of this rank's steps, by variant, and the share of the watching thread in the time."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    step, session = _training_step(plan, size), watch_world()
    if session is None:
        raise RuntimeError("there is no world to watch")
    found: dict[str, list[Times]] = {kind: [] for kind in VARIANTS}
    for _ in range(2):  # compile what each variant needs
        step()
        with sw.sanitize(every=2):
            step()
            step()
    begin, used = time.perf_counter(), session.watcher_seconds()
    for number in range(steps):
        for kind in ("alone", "guard") if number % 2 else ("guard", "alone"):
            with _unwatched() if kind == "alone" else nullcontext():
                found[kind].append(_timed(step))
    thread = (session.watcher_seconds() - used) / (time.perf_counter() - begin)
    for _ in range(steps // 2):
        with sw.sanitize(every=2):  # the first step is checked, the second is not
            found["sanitize"].append(_timed(step))
            found["unchecked"].append(_timed(step))
        found["base"].append(_timed(step))
    return found, thread


def ratios(found: dict[str, list[Times]], thread: float) -> dict[str, dict[str, float]]:
    """For each bound: the median of the ratios of neighbouring steps, the ratio of the best, and of the CPU times."""
    out: dict[str, dict[str, float]] = {kind: {} for kind in BOUNDS}
    for name, of in _STATISTICS.items():
        checked, unchecked = of(found["sanitize"], found["base"]), of(found["unchecked"], found["base"])
        # the thread runs in all steps, so that their ratio does not show it
        out["guard"][name] = of(found["guard"], found["alone"]) + thread
        out["sanitize"][name] = checked
        out["sanitize sampled"][name] = unchecked + (checked - unchecked) / _EVERY
    return out


_STATISTICS: dict[str, Callable[[list[Times], list[Times]], float]] = {
    "pairs": lambda a, b: statistics.median(x.elapsed / y.elapsed for x, y in zip(a, b, strict=True)),
    "best": lambda a, b: min(x.elapsed for x in a) / min(y.elapsed for y in b),
    "cpu": lambda a, b: statistics.median(x.cpu for x in a) / statistics.median(y.cpu for y in b),
}


def main() -> None:
    """Print a line per case, and fail if a bound is exceeded at the realistic size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--plan", choices=PLANS)
    given = parser.parse_args()
    print(f"{'':18}{'step':>10}{'':>20}{'pairs':>8}{'best':>8}{'cpu':>8}{'bound':>8}")
    exceeded = []
    for size in [given.size] if given.size else SIZES:
        for plan in [given.plan] if given.plan else PLANS:
            (found, thread), *_ = sw.launch(measure, given.ranks, plan, size, given.steps)
            best = min(t.elapsed for t in found["alone"])
            print(f"{size} {plan:8}{1e3 * best:8.2f}ms   watching thread {thread:.2%}", flush=True)
            for kind, row in ratios(found, thread).items():
                print(f"{kind:>46}" + "".join(f"{r:8.3f}" for r in row.values()) + f"{BOUNDS[kind]:8.2f}")
                if size == "realistic" and row["pairs"] > BOUNDS[kind]:
                    exceeded.append(f"{kind} with {plan}")
    if exceeded:
        sys.exit(f"above the bound: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
