"""Redistribute a matrix over 4 processes through several layouts; print the blocks of each rank and the bytes sent.

python -m examples.walk          starts 4 processes
torchrun --nproc-per-node 4 -m examples.walk
"""

import os
import sys
import time
from fractions import Fraction

import torch
import torch.distributed as dist
from tests.plan.torch_reference import Traffic, torch_traffic

import shardwise as sw
from shardwise.comm import counting
from shardwise.debug import picture
from shardwise.layout import Axes

SHAPE = (10, 6)
MESH = (2, 2)
WALK: list[tuple[str, tuple[str, str]]] = [
    ("rows over both axes, 10 rows on 4 ranks", ("S0", "S0")),
    ("rows on dp, columns on tp", ("S0", "S1")),
    ("columns on dp, rows on tp: two ranks swap blocks", ("S1", "S0")),
    ("columns on dp, replicated on tp", ("S1", "R")),
    ("replicated on dp, columns on tp", ("R", "S1")),
    ("replicated", ("R", "R")),
]


def placements(tokens: tuple[str, ...]) -> list[sw.Placement]:
    """Placements from their short names."""
    known: dict[str, sw.Placement] = {"R": sw.Replicate(), "P": sw.Partial()}
    return [known[t] if t in known else sw.Shard(int(t[1:])) for t in tokens]


def walk() -> tuple[list[tuple[int, Fraction]], bool]:
    """On each rank: redistribute from layout to layout, count what is sent, and check the values."""
    mesh = sw.init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
    matrix = torch.arange(60.0).view(SHAPE)
    x = sw.distribute_tensor(matrix, mesh, placements(WALK[0][1]))
    sent = []
    for _, tokens in WALK[1:]:
        with counting() as ledger:
            x = x.redistribute(placements=placements(tokens))
        sent.append((ledger.collectives, ledger.bytes))
    # a pending sum is reduced and split in one step
    parts = sw.DTensor.from_local(matrix * (dist.get_rank() + 1), mesh, placements(("P", "P")))
    with counting() as ledger:
        y = parts.redistribute(placements=placements(("S0", "S1")))
    sent.append((ledger.collectives, ledger.bytes))
    return sent, torch.equal(x.full_tensor(), matrix) and torch.equal(y.full_tensor(), matrix * 10)


def describe(collectives: int, sent: int) -> str:
    """The number of collectives and of bytes."""
    return f"{collectives} collective{'s' * (collectives != 1)}, {sent:,} B"


def show(
    title: str,
    source: tuple[str, ...],
    target: tuple[str, ...],
    torch_sent: Traffic | None,
    sent: tuple[int, int],
) -> None:
    """Print one redistribution: the plan, the bytes next to torch's, and a picture of the target."""
    axes = Axes(MESH, ("dp", "tp"))
    a, b = (sw.Layout.of(SHAPE, axes, placements(tokens)) for tokens in (source, target))
    print(f"\n{title}")
    for step in sw.plan_redistribute(a, b, 4).steps:
        print(f"  {step}")
    theirs = "not supported" if torch_sent is None else describe(torch_sent.collectives, torch_sent.bytes)
    print(f"  sent: {describe(*sent)}      torch: {theirs}")
    print(picture(b))


def main() -> None:
    """Run `walk` on 4 processes and print what was sent."""
    start = time.perf_counter()
    results = sw.launch(walk, 4)
    seconds = time.perf_counter() - start
    if (dist.is_initialized() and dist.get_rank()) or int(os.environ.get("RANK", 0)):
        return
    axes = Axes(MESH, ("dp", "tp"))
    first = sw.Layout.of(SHAPE, axes, placements(WALK[0][1]))
    print(f"A {SHAPE[0]}x{SHAPE[1]} matrix on 4 processes, a mesh of dp=2, tp=2.\n\n{WALK[0][0]}\n  {first}")
    print(picture(first))
    stops = [
        *((title, WALK[i][1], tokens) for i, (title, tokens) in enumerate(WALK[1:])),
        ("a pending sum over all ranks, reduced and split in one step", ("P", "P"), ("S0", "S1")),
    ]
    ours, torchs = [0, 0], [0, 0]
    for i, (title, source, target) in enumerate(stops):
        sent = (results[0][0][i][0], int(sum(rank[i][1] for rank, _ in results)))
        reference = torch_traffic(MESH, SHAPE, source, target)
        show(title, source, target, reference, sent)
        ours = [ours[0] + sent[0], ours[1] + sent[1]]
        if reference is not None:
            torchs = [torchs[0] + reference.collectives, torchs[1] + reference.bytes]
    outcome = "equal to" if all(ok for _, ok in results) else "DIFFERENT from"
    print(
        f"\nAfter the last step the matrix is {outcome} the one we started with, on every rank ({seconds:.1f} s)."
    )
    print(
        f"Total: {ours[0]} collectives and {ours[1]:,} B; torch.distributed.tensor uses "
        f"{torchs[0]} and {torchs[1]:,} B."
    )
    if not all(ok for _, ok in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
