"""Buckets: moves of one kind over the same axes become one collective on a flat buffer, up to a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from shardwise.compile.passes.memory_use import storages, written
from shardwise.compile.targets import GETITEM, Move, MoveMany
from shardwise.plan import AllGather, AllReduce, AllToAll, GroupedStep, ReduceScatter, Step
from shardwise.plan.grouped import Member
from shardwise.plan.settings import current_costs

__all__ = ["bucket_bytes", "bucket_moves"]


def bucket_bytes(step: Step) -> int:
    """The size of a bucket under the cost model in force: the latency is a tenth of the time that it takes to send."""
    latency, bandwidth = current_costs().pace(step.source.axes, step.axes)
    return int(10 * latency * bandwidth)


class _Candidate(NamedTuple):
    node: fx.Node
    place: int
    needed: int
    """The place of the first node that uses it, or writes to its source."""
    nbytes: int


def bucket_moves(graph: fx.Graph, limit: int | None = None, reductions: bool = False) -> int:
    """Merge moves that do not wait for each other; returns the number of collectives less.

    Args:
        graph: the graph.
        limit: the bytes of the source blocks in one collective, at most; None for `bucket_bytes`.
        reductions: merge reductions as well. Backends sum the parts of a buffer in an order that depends on their place in it, so
            with more than two ranks results may differ from eager ones in the last bits; they are the same in every run.

    Moves of parameters and activations are merged with those right after them, as long as nobody needs the first one before.
    """
    places = {n: i for i, n in enumerate(graph.nodes)}
    writes = [(i, w) for n, i in places.items() if (w := written(n))]
    waiting: dict[Any, list[_Candidate]] = {}
    buckets: list[list[_Candidate]] = []
    for node, place in places.items():
        kind = _kind(node, reductions)
        if kind is None:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        nbytes = source.meta["val"].nbytes
        users = min((places[u] for u in node.users), default=len(places))
        rewritten = min((i for i, w in writes if i > place and w & storages(source)), default=len(places))
        found = _Candidate(node, place, min(users, rewritten), nbytes)
        most = bucket_bytes(node.target.step) if limit is None else limit
        open_bucket = waiting.get(kind)
        if (
            open_bucket
            and min(c.needed for c in open_bucket) > place
            and sum(c.nbytes for c in open_bucket) + nbytes <= most
        ):
            open_bucket.append(found)
        else:
            waiting[kind] = [found]
            buckets.append(waiting[kind])
    for bucket in buckets:
        if len(bucket) > 1:
            _merge(graph, bucket)
    return sum(len(b) - 1 for b in buckets)


def _kind(node: fx.Node, reductions: bool) -> Any:
    """What moves must have in common to be one collective; None for others."""
    move = node.target
    if not isinstance(move, Move) or not move.is_collective:
        return None
    step, where = move.step, (id(move.mesh), move.step.axes, node.meta.get("section"))
    match step:
        case AllGather():
            return ("all-gather", *where, "")
        case AllToAll():
            return ("all-to-all", *where, "")
        case AllReduce() | ReduceScatter() if reductions:
            op = next(iter(step.reduced.values()))
            return (step.name, *where, "sum" if op == "avg" else op, move.dtype)
        case _:
            return None


def _merge(graph: fx.Graph, bucket: Sequence[_Candidate]) -> None:
    """Replace moves by one, in the place of the last."""
    nodes = [c.node for c in bucket]
    first: Any = nodes[0].target
    kind = _kind(nodes[0], True)
    members = tuple(Member(i, n.target.step) for i, n in enumerate(nodes))  # type: ignore[union-attr]
    dtypes = tuple(n.target.dtype for n in nodes)  # type: ignore[union-attr]
    step = GroupedStep(kind[0], first.step.axes, kind[4], members, tuple(d.itemsize for d in dtypes))
    target = MoveMany(step, first.mesh, first.coord, dtypes)
    with graph.inserting_before(nodes[-1]):
        many = graph.call_function(target, ([n.args[0] for n in nodes],))
        many.meta = dict(nodes[0].meta, val=[n.meta["val"] for n in nodes])
        parts = [graph.call_function(GETITEM, (many, i)) for i in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
