"""How long random blocks take next to torch's own generator, which knows no layout: ratios, interleaved, best of several.

`python -m benchmarks.random` prints them; a ratio of 2 means twice torch's time for as many numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from shardwise.random import Cells, Draw, bernoulli, exponential, integers, normal, permutation, uniform

__all__ = ["Case", "cases", "measure"]

_DRAW = Draw(1, 2)
_F32 = torch.float32


class Case(NamedTuple):
    """Two ways to the same number of random values."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]


def cases() -> list[Case]:
    """Blocks of a million float32 elements, whole and split, a few other kinds, and small blocks."""
    out = []
    blocks = {
        "whole 1024x1024": Cells((1024, 1024)),
        "rows of 4096x1024": Cells((4096, 1024), (range(1024, 2048), range(1024))),
        "columns of 1024x4096": Cells((1024, 4096), (range(1024), range(1024, 2048))),
        "columns of 1024x4099": Cells((1024, 4099), (range(1024), range(1025, 2050))),
        "factored 1024x(4 1024)": Cells(
            (1024, 4096), (range(1024), [i * 1024 + j for i in range(4) for j in range(256)])
        ),
        "small 64x64": Cells((64, 64)),
        "small columns of 64x257": Cells((64, 257), (range(64), range(65, 130))),
    }
    for name, block in blocks.items():
        out += _of_block(name, block)
    million, memory = Cells((2**20,)), torch.empty(2**20)
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


def _of_block(name: str, block: Cells) -> list[Case]:
    memory = torch.empty(block.shape)
    x = torch.ones(block.shape)

    def dropout() -> object:
        return bernoulli(_DRAW, block, _F32, p=0.9).mul_(1 / 0.9).mul_(x)

    return [
        Case(f"uniform, {name}", lambda: uniform(_DRAW, block, _F32, out=memory), lambda: memory.uniform_()),
        Case(f"normal, {name}", lambda: normal(_DRAW, block, _F32, out=memory), lambda: memory.normal_()),
        Case(f"dropout, {name}", dropout, lambda: F.dropout(x, 0.1)),
    ]


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """Seconds of ours and of torch's."""
    best = [float("inf")] * 2
    for _ in range(repeats):
        for i, run in enumerate(case[1:]):
            begin = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best[0], best[1]


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    print(f"{'':40}{'ours':>10}{'torch':>10}{'ratio':>8}")
    for case in cases():
        ours, theirs = measure(case, repeats)
        print(f"{case.name:40}{1e3 * ours:8.3f}ms{1e3 * theirs:8.3f}ms{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
