"""Comparison of our redistribution plans with what torch sends, for every pair of layouts."""

from dataclasses import dataclass

from tests.plan.torch_reference import Case, Pair, Traffic

from shardwise import Layout, Partial, Placement, Plan, Replicate, Shard, plan_redistribute
from shardwise.layout import Axes

ITEMSIZE = 4  # the reference is in float32


@dataclass(frozen=True)
class Comparison:
    """The traffic of all pairs of one mesh and shape, and the pairs for which ours is larger in either number."""

    pairs: int
    torch: Traffic
    ours: Traffic
    worse: list[Pair]


def placements(tokens: tuple[str, ...]) -> list[Placement]:
    """The placements for tokens of the reference."""
    known: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
    return [known[t] if t in known else Shard(int(t[1:])) for t in tokens]


def plan_for(case: Case, pair: Pair) -> Plan:
    """Our plan for a pair of the reference."""
    mesh, shape = case
    axes = Axes(mesh)
    source, target = (Layout.of(shape, axes, placements(tokens)) for tokens in pair)
    return plan_redistribute(source, target, ITEMSIZE)


def compare(case: Case, reference: dict[Pair, Traffic | None]) -> Comparison:
    """Compare our plans with torch's traffic for all pairs of a case."""
    theirs, ours = [0, 0], [0, 0]
    worse = []
    for pair, traffic in reference.items():
        if traffic is None:
            continue
        plan = plan_for(case, pair)
        if plan.collectives > traffic.collectives or plan.bytes > traffic.bytes:
            worse.append(pair)
        theirs = [theirs[0] + traffic.collectives, theirs[1] + traffic.bytes]
        ours = [ours[0] + plan.collectives, ours[1] + plan.bytes]
    return Comparison(len(reference), Traffic(*theirs), Traffic(*ours), worse)
