"""How long random blocks take next to torch's own generator, which knows no layout: ratios, interleaved, best of several.

`python -m benchmarks.random` prints them; a ratio of 2 means twice torch's time, on one thread, for as many numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.random import BlockIndices, Draw, exponential, integers, normal, permutation

__all__ = ["Case", "cases", "measure"]

_DRAW = Draw(1, 2)
_F32 = torch.float32


class Case(NamedTuple):
    """Two ways to the same number of random values."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


def cases() -> list[Case]:
    """Blocks of a million float32 elements, whole and split, a few other kinds, and small blocks.

    What is split is the second of 4 blocks of a DTensor, whose methods are called as a program calls them.
    """
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def block(*size: int, at: sw.Placement) -> Tensor:
        return sw.zeros(*size, device_mesh=mesh, placements=[at])

    blocks = {
        "whole 1024x1024": block(1024, 1024, at=sw.Replicate()),
        "plain 1024x1024": torch.zeros(1024, 1024),
        "rows of 4096x1024": block(4096, 1024, at=sw.Shard(0)),
        "columns of 1024x4096": block(1024, 4096, at=sw.Shard(1)),
        "columns of 1024x4099": block(1024, 4099, at=sw.Shard(1)),
        "factored 1024x(4 1024)": block(1024, 4, 1024, at=sw.Shard(2)).flatten(1),
        "small 64x64": block(64, 64, at=sw.Replicate()),
        "small columns of 64x257": block(64, 257, at=sw.Shard(1)),
    }
    out = [case for name, x in blocks.items() for case in _of_block(name, x)]
    million, memory = BlockIndices((2**20,)), torch.empty(2**20)
    whole = torch.empty(2**20, dtype=torch.int64)
    wide, half = torch.empty(2**20, dtype=torch.float64), torch.empty(2**20, dtype=torch.bfloat16)
    out += [
        Case(
            "normal, float64", lambda: normal(_DRAW, million, torch.float64, out=wide), lambda: wide.normal_()
        ),
        Case(
            "normal, bfloat16",
            lambda: normal(_DRAW, million, torch.bfloat16, out=half),
            lambda: half.normal_(),
        ),
        Case(
            "exponential",
            lambda: exponential(_DRAW, million, _F32, out=memory),
            lambda: memory.exponential_(),
        ),
        Case(
            "integers",
            lambda: integers(_DRAW, million, torch.int64, high=50_000, out=whole),
            lambda: whole.random_(0, 50_000),
        ),
        Case("permutation", lambda: permutation(_DRAW, million), lambda: torch.randperm(2**20)),
    ]
    return out


def _of_block(name: str, x: Tensor) -> list[Case]:
    alone = torch.zeros_like(x.to_local() if isinstance(x, sw.DTensor) else x)

    def ours(run: Callable[[Tensor], object]) -> Callable[[], object]:
        def inside() -> object:
            with sw.one_device():
                return run(x)

        return (lambda: run(x)) if isinstance(x, sw.DTensor) else inside

    return [
        Case(f"uniform, {name}", ours(lambda x: x.uniform_()), lambda: alone.uniform_()),
        Case(f"normal, {name}", ours(lambda x: x.normal_()), lambda: alone.normal_()),
        Case(f"dropout, {name}", ours(lambda x: F.dropout(x, 0.1)), lambda: F.dropout(alone, 0.1)),
    ]


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """Seconds of ours and of torch's, of the processor: a busy machine interrupts the longer of two more often."""
    best = [float("inf")] * 2
    for _ in range(repeats):
        for i, run in enumerate(case[1:]):
            begin = time.thread_time()
            run()
            best[i] = min(best[i], time.thread_time() - begin)
    return best[0], best[1]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    print(f"{'':40}{'ours':>10}{'torch':>10}{'ratio':>8}")
    for case in cases():
        ours, theirs = measure(case, repeats)
        print(f"{case.name:40}{1e3 * ours:8.3f}ms{1e3 * theirs:8.3f}ms{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
