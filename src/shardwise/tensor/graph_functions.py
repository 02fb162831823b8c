"""What `torch.compile` sees of this room: functions that its graphs call, and values that are constants in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import (
    Axes,
    Layout,
    MaskPartial,
    Partial,
    Replicate,
    Shard,
    Spec,
    SpecPattern,
    StridedShard,
    pattern_of,
)
from shardwise.layout.sizes import Symbols, set_symbols
from shardwise.plan.settings import current_settings, pop_settings, push_settings, restore_settings
from shardwise.tensor.dtensor import DTensor, implementation
from shardwise.tensor.indexing import replicated_index
from shardwise.tensor.local import from_local, to_local
from shardwise.tensor.redistribute import redistribute, to_layout
from shardwise.tensor.redistribute_many import redistribute_many
from shardwise.tensor.symbolic_specs import related
from shardwise.torch_internals.aliased_inputs import refuse_writes_to_shared_memory
from shardwise.torch_internals.collective_order import keep_collectives_alike
from shardwise.torch_internals.eager_graphs import support_eager_graphs
from shardwise.torch_internals.graph_calls import ScopedState, call_in_graph, guard_by_metadata, guard_state
from shardwise.torch_internals.graph_values import describe_constant, live_mesh, register_value, stable_hash
from shardwise.torch_internals.input_classes import accept_derived_inputs
from shardwise.torch_internals.late_numbers import restart_for_late_numbers
from shardwise.torch_internals.symbolic_inputs import note_new_inputs
from shardwise.torch_internals.symbolic_sizes import hash_by_expression, sign_of, symbolic_size, terms_of
from shardwise.torch_internals.symbols_in_graphs import find_symbols_in_graphs
from shardwise.torch_internals.tangents import accept_plain_tangents

__all__ = ["support_compile"]


def support_compile() -> None:
    """Register them."""
    for placement in (Shard, StridedShard, Replicate, Partial, MaskPartial):
        register_value(placement)
    register_value(Axes)
    register_value(Layout, lambda layout: f"{layout} on {layout.axes}")
    register_value(Spec, _spec_text)
    register_value(SpecPattern, _pattern_text)
    for function in (from_local, to_local, redistribute, to_layout, replicated_index, redistribute_many):
        call_in_graph(function)
    for effect in (push_settings, pop_settings):
        call_in_graph(effect, changes_state=True)
    accept_plain_tangents(DTensor, _tangent)
    keep_collectives_alike()
    support_eager_graphs()
    guard_by_metadata(DTensor, _guard)
    Spec.live_mesh, Spec.shape_type = staticmethod(live_mesh), torch.Size
    implementation.stable_hash = _stable_hash
    implementation.related = related
    hash_by_expression()
    note_new_inputs(DTensor)
    accept_derived_inputs(DTensor)
    refuse_writes_to_shared_memory(DTensor)
    find_symbols_in_graphs()
    restart_for_late_numbers()
    set_symbols(Symbols(symbolic_size, terms_of, sign_of, torch.sym_min, torch.sym_max))
    guard_state(ScopedState(settings_key, _save_settings))


def _tangent(plain: Tensor, context: tuple[SpecPattern, bool]) -> DTensor:
    """A plain gradient of a DTensor that compiled code returned: it counts as replicated, as in any backward pass."""
    pattern = context[0]
    with torch.no_grad():
        full = from_local(plain, pattern.mesh, None, False, None, None, grad_placements=None)
        return to_layout(full, pattern.layout(plain.shape))


def _guard(x: DTensor, sizes: list[int | None], strides: list[int | None]) -> Callable[[DTensor], bool]:
    """Whether compiled code for one tensor is for another: of the same layout, and of the same sizes that are not symbols."""
    spec, requires_grad = x._spec, x.requires_grad
    if None not in sizes and None not in strides:
        return lambda x: x._spec is spec and x.requires_grad is requires_grad
    pattern = pattern_of(spec)
    known = [(d, n) for d, n in enumerate(sizes) if n is not None]
    steps = [(d, n) for d, n in enumerate(strides) if n is not None]

    def is_for(x: DTensor) -> bool:
        spec = x._spec
        return (
            pattern_of(spec) is pattern
            and x.requires_grad is requires_grad
            and all(spec.shape[d] == n for d, n in known)
            and all(spec.stride[d] == n for d, n in steps)  # type: ignore[index]
        )

    return is_for


def _stable_hash(x: DTensor) -> str:
    """What compiled code of this rank depends on, beside the program: for caches that ranks and processes share."""
    block = x._local_tensor
    form = (tuple(block.shape), block.stride(), block.storage_offset(), block.device, block.is_contiguous())
    return stable_hash(_spec_text(x._spec), str(x.requires_grad), str(form), str(settings_key()))


def settings_key() -> Any:
    """What decisions of this thread depend on, beside the call that is decided."""
    return current_settings().key


def _save_settings() -> Callable[[], None]:
    settings = current_settings()
    return lambda: restore_settings(settings)


def _pattern_text(pattern: SpecPattern) -> str:
    return f"{pattern} units {pattern.units} on {describe_constant(pattern.mesh)}"


def _spec_text(spec: Spec) -> str:
    mesh = describe_constant(spec.mesh)
    return f"{spec} stride {spec.stride} units {spec.units} on {mesh}"
