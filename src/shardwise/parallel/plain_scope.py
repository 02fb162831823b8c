"""The scope in which plain tensors beside DTensors count as replicated."""

from __future__ import annotations

from functools import partial

from shardwise.comm import is_simulated
from shardwise.plan.settings import current_settings, push_settings
from shardwise.torch_internals.graph_calls import call_in_graph

__all__ = ["count_plain_as_replicated"]


@partial(call_in_graph, changes_state=True)
def count_plain_as_replicated() -> None:
    """Have plain tensors count as replicated until `pop_settings`, compared where that is asked for or costs nothing."""
    compare = is_simulated() or current_settings().plain == "check"
    push_settings(plain="check" if compare else "replicate")
