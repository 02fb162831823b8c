"""Views, which cost nothing wherever they are."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardwise.torch_internals.dispatcher import is_op

__all__ = ["is_view", "sink_views"]


def is_view(node: fx.Node) -> bool:
    """Whether a node returns a view of its argument, and does nothing else."""
    if node.op != "call_function" or not is_op(node.target):
        return False
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def sink_views(graph: fx.Graph) -> None:
    """Move views to where they are used, so that they do not make a result needed before it is."""
    for node in reversed(list(graph.nodes)):
        if node.users and is_view(node):
            min(node.users).prepend(node)
