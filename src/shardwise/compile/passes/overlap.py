"""Overlap: collectives start as soon as their blocks are there, and are waited for where their results are needed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import fx

from shardwise.compile.passes.memory_use import storages, written
from shardwise.compile.targets import Begin, Finish, Move, MoveMany

__all__ = ["overlap_collectives"]

_Key = tuple[int, int, int]


def overlap_collectives(graph: fx.Graph, ahead: int = 2) -> int:
    """Split collectives into a start and a wait, and move these apart; returns the number of those with work in between.

    Args:
        graph: the graph.
        ahead: a collective starts when the one so many before it is no longer needed to be waited for, at the earliest: what is
            under way holds memory.

    Collectives start in the order of the graph, which is the same on all ranks. Results are the same bits.
    """
    nodes = list(graph.nodes)
    places = {n: i for i, n in enumerate(nodes)}
    moves = [n for n in nodes if isinstance(n.target, Move | MoveMany) and n.target.is_collective]
    writes = [(i, w) for i, n in enumerate(nodes) if (w := written(n))]
    inputs = sum(n.op == "placeholder" for n in nodes)
    begins: dict[fx.Node, _Key] = {}
    needed: list[int] = []
    for number, node in enumerate(moves):
        earliest = max((places[n] for n in node.all_input_nodes), default=0)
        sources = set().union(*(storages(n) for n in node.all_input_nodes))
        earliest = max([earliest, *(i for i, w in writes if i < places[node] and w & sources)])
        if number:
            earliest = max(earliest, begins[moves[number - 1]][0])
        if number >= ahead:
            earliest = max(earliest, min(needed[number - ahead], places[node] - 1))
        begins[node] = (max(earliest, inputs - 1), 3, number)
        needed.append(min((places[u] for u in node.users), default=len(nodes)))
    keys: dict[fx.Node, _Key] = {n: (i, 1, 0) for n, i in places.items() if n not in begins}
    for number, node in enumerate(moves):
        sources = set().union(*(storages(n) for n in node.all_input_nodes))
        ends = [(begins[u][0], 2, number) if u in begins else (places[u], 0, number) for u in node.users]
        # the collective may still be reading its source
        ends += [(i, 0, number) for i, w in writes if i > places[node] and w & sources]
        _split(graph, node, begins[node], min(ends, default=(len(nodes), 0, number)), keys)
    _reorder(graph, keys)
    ordered = list(graph.nodes)
    now = {n: i for i, n in enumerate(ordered)}
    return sum(
        any(
            ordered[i].op == "call_function" and not isinstance(ordered[i].target, Begin | Finish)
            for i in range(now[n] + 1, now[f])
        )
        for n in ordered
        if isinstance(n.target, Begin)
        for f in n.users
        if isinstance(f.target, Finish)
    )


def _split(graph: fx.Graph, node: fx.Node, begin: _Key, finish: _Key, keys: dict[fx.Node, _Key]) -> None:
    """Replace a move by a start and a wait, with their places."""
    move: Any = node.target
    with graph.inserting_before(node):
        first = graph.call_function(Begin(move), node.args)
        last = graph.call_function(Finish(move), (first, [] if isinstance(move, MoveMany) else node.args[0]))
    first.meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": None}
    last.meta = dict(node.meta)
    keys[first], keys[last] = begin, finish
    node.replace_all_uses_with(last)
    graph.erase_node(node)


def _reorder(graph: fx.Graph, keys: dict[fx.Node, _Key]) -> None:
    """Put the nodes of a graph into the order of their keys."""
    ordered = sorted(graph.nodes, key=keys.__getitem__)
    for before, node in pairwise(ordered):
        before.append(node)
