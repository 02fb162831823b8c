"""Resolving a call by its rule: which layouts its operands move to, what runs on the blocks, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import map_tensors
from shardwise.call.listed_rule import listed_rule
from shardwise.call.local_program import LocalProgram, local_programs
from shardwise.call.op_call import OpCall
from shardwise.call.schema import OpInfo
from shardwise.comm import coord_of
from shardwise.layout import Layout, Spec, UnitPlacements, block_shape, without_pending
from shardwise.layout.sizes import as_sizes, same_sizes
from shardwise.plan import Choice, Plan, choose, choose_view, plan_redistribute
from shardwise.plan.unit_axes import units_of_results, units_of_view
from shardwise.rules import Call, Creates, Listed, Listing, Rule, Slot
from shardwise.rules.table import REGISTERED, row_of
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import holds_sparse

__all__ = ["Match", "Resolution", "match_rule", "resolve"]


@dataclass(frozen=True, eq=False)
class Resolution:
    """How the rule of an op runs a call.

    Attributes:
        moves: a plan per tensor, or None where it stays.
        programs: what each rank runs on its blocks instead of the op, or None where all ranks run the op itself.
        outputs: the specs of the tensor results.
        mesh: the mesh of the call.
        simulated: whether all ranks are simulated in this process.
        is_view: the result has the elements of the first tensor in another shape.
        view_shape: this rank's block of such a result.
        replicated: outputs that are the same on all ranks, with shapes that only the kernel knows.
    """

    moves: tuple[Plan | None, ...]
    programs: dict[int | None, LocalProgram | None] | None
    outputs: tuple[Spec, ...]
    mesh: DeviceMesh
    simulated: bool
    is_view: bool = False
    view_shape: tuple[int, ...] | None = None
    replicated: frozenset[int] = frozenset()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """What it sends."""
        return tuple(plan for plan in self.moves if plan is not None)


def resolve(call: OpCall) -> Resolution | None:
    """The cheapest way to run a call by its rule, or None if no rule covers it."""
    match = match_rule(call)
    if match is None:
        return None
    mesh, layouts = call.mesh, call.layouts
    itemsizes = [t.dtype.itemsize for t in call.tensors]
    choice = _choose(call, match, itemsizes)
    if choice is None:
        return None
    programs = local_programs(match.call, match.rule, choice, mesh, call.simulated)
    if programs is not None and match.written not in ((), (0,)):
        return None
    metas = (m for m in match.outputs if isinstance(m, Tensor))
    outputs = tuple(
        Spec(mesh, layout, meta.dtype, torch.Size(meta.shape), tuple(meta.stride()), units)
        for layout, meta, units in zip(choice.outputs, metas, _units(call, match), strict=True)
    )
    pairs = zip(layouts, choice.inputs, itemsizes, strict=True)
    # an op that creates a tensor reads no values, so its operands stay even where a reduction is pending
    moves = tuple(None if match.creates or a is b else plan_redistribute(a, b, size) for a, b, size in pairs)
    is_view = match.rule is None
    coord = None if call.simulated else coord_of(mesh)
    shape = block_shape(choice.outputs[0], coord) if is_view and coord is not None else None
    replicated = match.rule.alike if isinstance(match.rule, Rule) else frozenset()
    return Resolution(moves, programs, outputs, mesh, call.simulated, is_view, shape, replicated)


def _units(call: OpCall, match: Match) -> list[UnitPlacements]:
    """The placements of the results on axes of size 1."""
    shapes = match.call.outputs
    units = [t._spec.units if isinstance(t, DTensor) else () for t in call.tensors]
    if not any(units) or isinstance(match.rule, Listed):
        return [()] * len(shapes)
    first = call.layouts[0].shape
    if match.rule is None:
        return [units_of_view(units[0], first, shapes[0])]
    if match.creates:
        return [without_pending(units[0]) if s == first else () for s in shapes]
    return units_of_results(match.rule, units, len(shapes))


def _choose(call: OpCall, match: Match, itemsizes: list[int]) -> Choice | None:
    layouts, outputs = call.layouts, match.call.outputs
    if match.rule is None:
        return choose_view(layouts[0], outputs[0], itemsizes[0])
    if match.creates:
        first = layouts[0]
        if not match.keeps_pending:
            layouts = [layout.with_partial({}) for layout in layouts]
        created = (
            layouts[0] if same_sizes(first.shape, s) else Layout.replicated(s, first.axes) for s in outputs
        )
        return Choice(tuple(layouts), tuple(created))
    fixed = [layouts[i] for i in match.written] if call.info.returns_written else ()
    return choose(match.rule, layouts, outputs, itemsizes, fixed=fixed, kept=match.written)


class Match(NamedTuple):
    """A call and its rule.

    Attributes:
        call: the call as rules see it.
        rule: the rule for this call; None for a view, whose layout follows from the shapes.
        outputs: the results on the meta device.
        written: the tensors that the op writes to, by position.
        creates: "memory" or "values" for an op that only creates a tensor like the first one, without reading values.
    """

    call: Call
    rule: Rule | Listed | None
    outputs: list[Any]
    written: tuple[int, ...]
    creates: Creates = ""

    @property
    def keeps_pending(self) -> bool:
        """Whether the tensor that the op creates has the pending reductions of the first one."""
        return self.creates == "memory" and self.call.dtypes[0] == self.call.output_dtypes[0]


def match_rule(call: OpCall) -> Match | None:
    """Match a call, on DTensors or on plain tensors, with its rule; None if no rule covers it."""
    info = call.info
    registered = REGISTERED.get(info.name)
    row = registered or row_of(info.rule_name)
    if row is None and (info.rule_name not in REGROUPED or info.writes):
        return None
    if any(map(holds_sparse, call.tensors)):
        return None
    outputs = call.outputs
    if outputs is None:
        return None
    seen = _as_rules_see_it(info, call, outputs)
    if row is None:
        return Match(seen, None, outputs, ())
    written = _written_slots(info, seen) if registered else (0,) if info.writes else ()
    if isinstance(row, Listing):
        return Match(seen, listed_rule(row, seen, call), outputs, written)
    rule = row.build(seen)
    if rule is None:
        return None
    rule = rule.cast(seen)
    creates = "" if row.makes is None else row.makes(seen)
    return Match(seen, rule.writing(written) if registered else rule, outputs, written, creates)


def _written_slots(info: OpInfo, call: Call) -> tuple[int, ...]:
    """The tensors of a call that the op writes to, by its schema."""
    slots = zip(info.tensor_arguments, call.slots(), strict=True)
    return tuple(slot for i, here in slots if info.arguments[i].writes for slot in here)


def _as_rules_see_it(info: OpInfo, call: OpCall, outputs: list[Any]) -> Call:
    """The call with tensors as slots, and with shapes and dtypes by name."""
    numbers = iter(range(len(call.tensors)))
    args = map_tensors(lambda t: Slot(next(numbers)), call.args)
    kwargs = map_tensors(lambda t: Slot(next(numbers)), call.kwargs)
    named = info.bind(args, kwargs)
    tensors = [named[info.arguments[i].name] for i in info.tensor_arguments]
    results = [t for t in outputs if isinstance(t, Tensor)]
    return Call(
        info.rule_name or info.name,
        named,
        tuple(tuple(value) if isinstance(value, list) else value for value in tensors),
        tuple(as_sizes(t.shape) for t in call.tensors),
        tuple(as_sizes(t.shape) for t in results),
        tuple(isinstance(t, Tensor) for t in outputs),
        tuple(str(t.dtype).removeprefix("torch.") for t in call.tensors),
        tuple(str(t.dtype).removeprefix("torch.") for t in results),
    )
