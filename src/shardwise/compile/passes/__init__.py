"""Passes: functions that change a captured graph and keep its results. `Passes` says which to run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardwise.compile.passes.bucket import bucket_moves
from shardwise.compile.passes.dead_code import remove_dead_code
from shardwise.compile.passes.overlap import overlap_collectives
from shardwise.compile.passes.reduce_once import reduce_once
from shardwise.compile.passes.reuse import reuse_moves
from shardwise.compile.passes.views import sink_views

__all__ = ["EXACT", "FAST", "NONE", "Passes"]


@dataclass(frozen=True)
class Passes:
    """Which passes to run on a program, in this order.

    Args:
        reuse: one move per tensor and target layout in each of forward, backward and optimizer.
        reassociate: sums of reductions become reductions of sums, and buckets include reductions. This changes the order of
            floating-point sums: results differ from eager ones in the last bits, and are the same in every run.
        bucket: merge moves of one kind into one collective of so many bytes at most; None for the size at which the latency of the
            cost model in force is a tenth of the time; 0 to merge nothing.
        overlap: how many collectives may be under way at a time: they start early and are waited for late; 0 for none.
    """

    reuse: bool = True
    reassociate: bool = False
    bucket: int | None = None
    overlap: int = 2

    def apply(self, graph: fx.Graph) -> dict[str, int]:
        """Change a graph; returns what each pass did: the collectives that it saved, or that it overlaps with other work."""
        did = {}
        if self.reuse:
            did["reuse"] = reuse_moves(graph)
        if self.reassociate:
            did["reassociate"] = reduce_once(graph)
        sink_views(graph)
        if self.bucket != 0:
            did["bucket"] = bucket_moves(graph, self.bucket, self.reassociate)
        remove_dead_code(graph)
        if self.overlap:
            did["overlap"] = overlap_collectives(graph, self.overlap)
        return did


NONE = Passes(reuse=False, bucket=0, overlap=0)
"""The collectives of the plans, in their order."""
EXACT = Passes()
"""Everything that keeps the bits."""
FAST = Passes(reassociate=True)
"""Everything."""
