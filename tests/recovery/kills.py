"""Elastic runs of which ranks are killed at drawn moments, many times: what is left must be right, and go on soon.

python -m tests.recovery.kills --runs 100
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.recovery.training import MOMENTS, Death, train, uninterrupted

import shardwise as sw

LATEST = 3.0


def forked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that new processes cannot import: `elastic` forks, which takes less time than importing torch."""
    return lambda *args: fn(*args)


def drawn_deaths(rng: random.Random, count: int) -> list[Death]:
    """Members that die one after the other."""
    members = rng.sample(range(4), count)
    return [
        Death(m, rng.choice(MOMENTS[:5] if i == 0 else MOMENTS), rng.randrange(1, 6) if i == 0 else 1 + 2 * i)
        for i, m in enumerate(members)
    ]


def check(found: list[Any], deaths: list[Death], work: Path, expected: list[tuple[float, str]]) -> float:
    """All that is left ended with the right losses; the longest time from a death to the end of the next step."""
    assert all(found[d.member] is None for d in deaths if (work / f"killed-{d.member}").exists())
    left = [f for f in found if f is not None]
    assert left
    for each in left:
        assert each["wrong"] == []
        for step, (loss, mask) in each["losses"].items():
            assert mask == expected[step][1]
            assert abs(loss - expected[step][0]) <= 1e-6 * abs(expected[step][0])
        assert max(each["losses"]) == len(expected) - 1
    last = max((float(p.read_text()) for p in work.glob("killed-*")), default=None)
    return 0.0 if last is None or left[0]["generation"] == 0 else max(f["done"] for f in left) - last


def main() -> None:
    """Kill until there have been enough runs; the times from a death to the end of the first step after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng, expected, times, kills = random.Random(given.seed), uninterrupted(), [], 0
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as name:
            deaths = drawn_deaths(rng, rng.randrange(1, 4))
            found = sw.elastic(forked(train), 4, Path(name), deaths, copies=2)
            kills += len(list(Path(name).glob("killed-*")))
            if seconds := check(found, deaths, Path(name), expected):
                times.append(seconds)
    shown = {"median": round(statistics.median(times), 3), "max": round(max(times), 3)}
    print(json.dumps({"runs": given.runs, "kills": kills, "seconds to go on": shown}))
    if max(times) > LATEST:
        raise SystemExit(f"It took longer than {LATEST} s to go on.")


if __name__ == "__main__":
    main()
