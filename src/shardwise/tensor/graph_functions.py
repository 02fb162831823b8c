"""What `torch.compile` sees of this room: functions that its graphs call, and values that are constants in them."""

from __future__ import annotations

from shardwise.layout import Axes, Layout, MaskPartial, Partial, Replicate, Shard, Spec, StridedShard
from shardwise.tensor.indexing import replicated_index
from shardwise.tensor.local import from_local, to_local
from shardwise.tensor.redistribute import redistribute, to_layout
from shardwise.torch_internals.graph_calls import call_in_graph
from shardwise.torch_internals.graph_values import describe_constant, register_value

__all__ = ["support_compile"]


def support_compile() -> None:
    """Register them."""
    for placement in (Shard, StridedShard, Replicate, Partial, MaskPartial):
        register_value(placement)
    register_value(Axes)
    register_value(Layout, lambda layout: f"{layout} on {layout.axes}")
    register_value(Spec, _spec_text)
    for function in (from_local, to_local, redistribute, to_layout, replicated_index):
        call_in_graph(function)


def _spec_text(spec: Spec) -> str:
    mesh = describe_constant(spec.mesh)
    return f"{spec} stride {spec.stride} units {spec.units} on {mesh}"
