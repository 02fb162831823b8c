"""Every op of torch's `op_db` on random layouts: results and gradients compared with the dense ones.

python -m benchmarks.sweep                       everything, on all cores (hours)
python -m benchmarks.sweep --samples 3           at most three samples of each op and dtype
python -m benchmarks.sweep --only addmm --dtype bfloat16 --seed 7
python -m benchmarks.sweep --part 0/4            every fourth op, for one of four machines
"""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from tests.op_db.excluded import excluded
from tests.op_db.sweep import DTYPES, KINDS, OPS, Tally, sweep_op
from tests.op_db.verdict import Verdict


def silence() -> None:
    """Turn off warnings and logs, which the report contains anyway."""
    warnings.filterwarnings("ignore")
    logging.getLogger("shardwise").setLevel(logging.ERROR)


Job = tuple[str, str, int | None, str, int | None]


def _worker(pipe: Any) -> None:
    torch.set_num_threads(1)
    silence()
    while (job := pipe.recv()) is not None:
        pipe.send(sweep_op(*job))


def run_all(jobs: list[Job], processes: int) -> Iterator[Tally]:
    """Yield the tally of each job when it is finished. Jobs run in worker processes; a crash counts as an error of the op."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    waiting, busy = list(reversed(jobs)), {}

    def assign(pipe: Any = None) -> None:
        if not waiting:
            if pipe is not None:
                pipe.send(None)
            return
        if pipe is None:
            pipe, worker_end = context.Pipe()
            context.Process(target=_worker, args=(worker_end,), daemon=True).start()
            worker_end.close()
        busy[pipe] = waiting.pop()
        pipe.send(busy[pipe])

    for _ in range(processes):
        assign()
    while busy:
        for pipe in multiprocessing.connection.wait(list(busy)):
            op, dtype, *_ = busy.pop(pipe)
            try:
                yield pipe.recv()
                assign(pipe)
            except EOFError:
                crash = Tally(op, dtype)
                crash.add(-1, Verdict("error", "the process crashed"))
                yield crash
                assign()


def _row(op: str, tallies: list[Tally]) -> str:
    kinds = sum((t.kinds for t in tallies), Counter[str]())
    routes = sum((t.routes for t in tallies), Counter[str]())
    counts = " ".join(f"{kinds[k]:7}" for k in KINDS) + " |" + "".join(f" {routes[r]:7}" for r in _ROUTES)
    return f"{op:52} {counts} {'missed a split' if any(t.missed_splits for t in tallies) else ''}".rstrip()


_ROUTES = ("rule", "alternative", "fallback")


def report(tallies: list[Tally]) -> int:
    """Print the tables; return the number of ops that failed."""
    by_op: dict[str, list[Tally]] = collections.defaultdict(list)
    for t in tallies:
        by_op[t.op].append(t)
    print(f"{'op':52} " + " ".join(f"{k:>7}" for k in KINDS) + " |" + "".join(f" {r:>7}" for r in _ROUTES))
    for op in sorted(by_op):
        print(_row(op, by_op[op]))
    print("\nfailed, or equal up to rounding; to repeat one: --only =OP --dtype DTYPE --number N")
    for t in sorted(tallies, key=lambda t: (t.op, t.dtype)):
        for kind, number, why in t.whys:
            if kind != "skipped":
                print(f"{kind:8} {t.op} {t.dtype} {number}: {why}")
    print("\nnot compared by value:")
    for op in sorted(by_op):
        if why := excluded(OPS[op]):
            print(f"{op:52} {why}")
    skips = Counter((t.op, why) for t in tallies for kind, _, why in t.whys if kind == "skipped")
    print("\nskipped:")
    for (op, why), count in sorted(skips.items()):
        print(f"{op:52} {count:4} {why}")
    print("\ngathered by the fallback although a split could have been kept:")
    missed = {op: dict(c for t in ts for c in t.missed_splits.items()) for op, ts in by_op.items()}
    for op, found in sorted(missed.items()):
        for aten, how in found.items():
            print(f"{op:52} {aten}: {how}")
    print(f"\n{'dtype':10} {'ops':>5} {'passed':>9} " + " ".join(f"{k:>7}" for k in KINDS))
    bad: set[str] = set()
    for dtype in DTYPES:
        mine = [t for t in tallies if t.dtype == dtype]
        passed = [t for t in mine if not (t.kinds["wrong"] or t.kinds["error"])]
        bad |= {t.op for t in mine} - {t.op for t in passed}
        kinds = sum((t.kinds for t in mine), Counter[str]())
        print(f"{dtype:10} {len(mine):5} {len(passed):9} " + " ".join(f"{kinds[k]:7}" for k in KINDS))
    count = sum(1 for found in missed.values() if found)
    print(
        f"{len(by_op)} ops, {len(bad)} of them failed, {count} gathered by the fallback although a split could have been kept"
    )
    return len(bad)


def main() -> None:
    """Run the jobs that the options select and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="ops with this in their name; =NAME for exactly one")
    parser.add_argument(
        "--samples", type=int, default=None, help="the largest number of samples per op and dtype"
    )
    parser.add_argument("--number", type=int, default=None, help="only the sample with this number")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="dtypes, separated by commas")
    parser.add_argument("--seed", default="0", help="seed of the random layouts")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th op, from the i-th")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    which, parts = map(int, options.part.split("/"))
    name = options.only
    ops = [n for n in OPS if (n == name[1:] if name.startswith("=") else name in n)][which::parts]
    jobs = [
        (op, dtype, options.samples, options.seed, options.number)
        for op in ops
        for dtype in options.dtype.split(",")
        if getattr(torch, dtype) in OPS[op].supported_dtypes("cpu")
    ]
    start, tallies = time.perf_counter(), []
    random.Random(0).shuffle(jobs)  # a sweep that is stopped has covered a fair sample
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for done, tally in enumerate(run_all(jobs, options.jobs), 1):
            tallies.append(tally)
            for kind, number, why in tally.whys:
                if kind in ("wrong", "error"):
                    progress = f"{done}/{len(jobs)}"
                    print(f"{progress} {kind} {tally.op} {tally.dtype} {number}: {why}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"stopped after {len(tallies)} of {len(jobs)} ops and dtypes")
    bad = report(tallies)
    slow = sorted(tallies, key=lambda t: -t.seconds)[:3]
    print(
        f"{time.perf_counter() - start:.0f} s; slowest: {', '.join(f'{t.op} {t.seconds:.0f} s' for t in slow)}"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
