"""Views, which cost nothing wherever they are."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["is_view", "sink_views"]


def is_view(node: fx.Node) -> bool:
    """Whether a node returns a view of its argument, and does nothing else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def sink_views(graph: fx.Graph) -> None:
    """Move views to where they are used, so that they do not make a result needed before it is."""
    for node in reversed(list(graph.nodes)):
        if node.users and is_view(node):
            min(node.users).prepend(node)
