"""Which memory a node's value refers to, and which memory a node writes to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from shardwise.torch_internals.subclass import storage_id

__all__ = ["last_writes", "storages", "written"]


def storages(node: fx.Node) -> set[int]:
    """The memory that the value of a node refers to; views share it."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return {storage_id(t) for t in parts if isinstance(t, Tensor)}


def written(node: fx.Node) -> set[int]:
    """The memory that a node writes to, besides new memory for its results."""
    schema: Any = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return set()
    found: set[int] = set()
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = node.kwargs.get(a.name, node.args[i] if i < len(node.args) else None)
            for n in value if isinstance(value, list | tuple) else [value]:
                if isinstance(n, fx.Node):
                    found |= storages(n)
    return found


def last_writes(graph: fx.Graph) -> dict[fx.Node, dict[int, int]]:
    """For each node, by memory that was written to before it, the number of the last node that wrote to it."""
    found: dict[fx.Node, dict[int, int]] = {}
    now: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        found[node] = now
        if new := written(node):
            now = now | dict.fromkeys(new, i)
    return found
