"""Sums of reductions become reductions of sums: terms are added where they are, and reduced once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.compile.passes.memory_use import storages, written
from shardwise.compile.targets import Move
from shardwise.plan import AllReduce, ReduceScatter

__all__ = ["reduce_once"]

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def reduce_once(graph: fx.Graph) -> int:
    """Reduce the sum of two blocks instead of each of them, where both go the same way; returns the number of reductions less.

    The gradients of a tensor that several layers gather are such sums. This changes the order of a floating-point sum, so results
    may differ from eager ones in the last bits; they are the same in every run.
    """
    gone = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_ADD, _ADD_IN_PLACE) or len(node.args) != 2:
            continue
        a, b = node.args
        if node.kwargs or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
            continue
        if not _can_be_added_first(a, b):
            continue
        terms = [a.args[0], b.args[0]]
        target: Any = a.target
        before = [t.meta["val"] for t in terms if isinstance(t, fx.Node)]
        if node.target is _ADD_IN_PLACE and len(storages(a) & _written_elsewhere(graph, node)):
            continue
        with graph.inserting_before(node):
            total = graph.call_function(_ADD, tuple(terms))
            total.meta = dict(node.meta, val=_sum_of(*before))
            moved = graph.call_function(target, (total,))
            moved.meta = dict(a.meta, val=a.meta["val"])
        node.replace_all_uses_with(moved)
        for old in (node, a, b):
            graph.erase_node(old)
        gone += 1
    return gone


def _written_elsewhere(graph: fx.Graph, node: fx.Node) -> set[int]:
    return set().union(*(written(n) for n in graph.nodes if n is not node))


def _can_be_added_first(a: fx.Node, b: fx.Node) -> bool:
    return (
        isinstance(a.target, Move)
        and isinstance(b.target, Move)
        and a.target.key == b.target.key
        and isinstance(a.target.step, AllReduce | ReduceScatter)
        and all(op in ("sum", "avg") for op in a.target.step.reduced.values())
        and len(a.users) == len(b.users) == 1
    )


def _sum_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b
