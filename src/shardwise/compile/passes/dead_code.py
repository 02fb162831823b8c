"""Dead-code elimination, including unused collectives and writes to memory that is never read."""

from __future__ import annotations

from torch import fx

from shardwise.compile.passes.memory_use import storages, written

__all__ = ["remove_dead_code"]


def remove_dead_code(graph: fx.Graph) -> int:
    """Remove nodes whose results are never read, and return how many. Inputs stay.

    A node that writes in place is alive if an input, or a node after it that is alive, has the memory. All ranks have the same
    graph, so all leave out the same collectives.
    """
    alive: set[fx.Node] = set()
    read: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            read |= storages(node)
    for node in reversed(graph.nodes):
        is_needed = node.op in ("placeholder", "output") or node in alive or bool(written(node) & read)
        if is_needed:
            alive.add(node)
            for n in node.all_input_nodes:
                alive.add(n)
                read |= storages(n)
    dead = [node for node in reversed(graph.nodes) if node not in alive]
    for node in dead:
        graph.erase_node(node)
    return len(dead)
