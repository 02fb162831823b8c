"""Redistribution compared with torch's: collectives and bytes of every pair of layouts, and the planning time.

Bytes and collectives are exact. Those of torch were counted by running it (`tests.plan.torch_reference`); ours are those
of the plans, which tests compare with the bytes that are sent.
"""

import statistics
import time

from tests.plan.torch_comparison import ITEMSIZE, compare, placements
from tests.plan.torch_reference import Pair, load_reference

from shardwise import Layout, plan_redistribute
from shardwise.layout import Axes
from shardwise.plan.settings import forget_decisions


def planning_times(mesh: tuple[int, ...], shape: tuple[int, ...], pairs: list[Pair]) -> list[float]:
    """Milliseconds to plan each pair with nothing cached."""
    out = []
    for source, target in pairs:
        axes = Axes(mesh)
        a = Layout.of(shape, axes, placements(source))
        b = Layout.of(shape, axes, placements(target))
        forget_decisions()
        start = time.perf_counter()
        plan_redistribute(a, b, ITEMSIZE)
        out.append(1e3 * (time.perf_counter() - start))
    return out


def main() -> None:
    """Print the table."""
    reference = load_reference()
    print(f"{'mesh':12}{'shape':13}{'pairs':>6}  {'collectives':>17}  {'bytes':>25}  {'saved':>6}  worse")
    print(f"{'':31}  {'torch':>8} {'ours':>8}  {'torch':>12} {'ours':>12}  {'bytes':>6}  pairs")
    total = [0, 0, 0, 0]
    for case, table in reference.items():
        c = compare(case, table)
        mesh, shape = case
        print(
            f"{mesh!s:12}{shape!s:13}{c.pairs:>6}  {c.torch.collectives:>8,} {c.ours.collectives:>8,}  "
            f"{c.torch.bytes:>12,} {c.ours.bytes:>12,}  {1 - c.ours.bytes / c.torch.bytes:>6.0%}  {len(c.worse)}"
        )
        total = [
            total[0] + c.torch.collectives,
            total[1] + c.ours.collectives,
            total[2] + c.torch.bytes,
            total[3] + c.ours.bytes,
        ]
    print(
        f"{'all':31}  {total[0]:>8,} {total[1]:>8,}  {total[2]:>12,} {total[3]:>12,}  {1 - total[3] / total[2]:>6.0%}"
    )
    print(f"\ncollectives saved: {1 - total[1] / total[0]:.0%}\n")
    print("planning a cold pair, ms (best of 3)      median      99%      worst")
    pairs = list(reference[(2, 2, 2), (13, 7, 5)])[::7]
    for mesh, shape in [((2, 2, 2), (13, 7, 5)), ((16, 16, 16), (100, 4096, 64))]:
        runs = [planning_times(mesh, shape, pairs) for _ in range(3)]
        best = sorted(min(times) for times in zip(*runs, strict=True))
        print(
            f"  mesh {mesh!s:14} shape {shape!s:16} {statistics.median(best):>8.2f} "
            f"{best[int(len(best) * 0.99)]:>8.2f} {best[-1]:>10.2f}"
        )


if __name__ == "__main__":
    main()
