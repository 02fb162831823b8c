"""One move per tensor and target layout: a block that was moved is not moved again."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.compile.passes.memory_use import last_writes, storages, written
from shardwise.compile.passes.views import is_view
from shardwise.compile.targets import GETITEM, Move, MoveMany

__all__ = ["reuse_moves"]


def reuse_moves(graph: fx.Graph) -> int:
    """Let nodes that move the same block to the same layout share one move; returns the number of moves that are gone.

    A move of the forward pass is not kept for the backward pass, which would cost the memory that moving it again saves. Results
    are the same bits. Nodes that view a block are shared as well, since moves of equal views are equal moves.
    """
    writes = last_writes(graph)
    ever_written = set().union(*(written(n) for n in graph.nodes))
    known: dict[Any, fx.Node] = {}
    gone = 0
    for node in list(graph.nodes):
        key = _key(node)
        if key is None or (_memory(node) & ever_written and not is_view(node)):
            continue
        # what has been written to since is another value
        sources = set().union(*(storages(n) for n in node.all_input_nodes))
        stamp = tuple(sorted((s, writes[node].get(s, -1)) for s in sources))
        first = known.setdefault((key, stamp), node)
        if first is node:
            continue
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        gone += isinstance(node.target, Move | MoveMany) and node.target.is_collective
    return gone


def _memory(node: fx.Node) -> set[int]:
    """The memory of a node's results, those of its items included."""
    return storages(node).union(*(storages(n) for n in node.users if n.target is not node.target))


def _key(node: fx.Node) -> Any:
    """Equal for nodes that compute the same from the same; None for others than moves and views."""
    if node.op != "call_function":
        return None
    section = node.meta.get("section")
    if isinstance(node.target, Move | MoveMany):
        args: Any = node.args[0]
        return (node.target.key, tuple(args) if isinstance(args, list | tuple) else args, section)
    if is_view(node) or node.target is GETITEM:
        return (node.target, _frozen(node.args), _frozen(tuple(node.kwargs.items())))
    return None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
