"""Views, which cost nothing wherever they are."""

from __future__ import annotations

from torch import fx

from shardwise.call.schema import op_info
from shardwise.torch_internals.dispatcher import is_op

__all__ = ["is_view", "sink_views"]


def is_view(node: fx.Node) -> bool:
    """Whether a node returns a view of its argument, and does nothing else."""
    if node.op != "call_function" or not is_op(node.target):
        return False
    info = op_info(node.target)
    return not info.writes and any(r.alias for r in info.returns)


def sink_views(graph: fx.Graph) -> None:
    """Move views to where they are used, so that they do not make a result needed before it is."""
    for node in reversed(list(graph.nodes)):
        if node.users and is_view(node):
            min(node.users).prepend(node)
