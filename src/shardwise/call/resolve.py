"""The cold path of an op: from a call to a recipe that later calls like it run at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.fallback import tensors_in
from shardwise.call.listed_rule import listed
from shardwise.call.meta import made_by
from shardwise.comm import Coord, PerRank, axes_of, coord_of, members_of
from shardwise.dispatch.fast_path import binding
from shardwise.layout import Layout, Spec, block_offset, block_shape
from shardwise.plan import Choice, Plan, choose, choose_view, plan_redistribute
from shardwise.rules import Call, Listed, Listing, Local, Out, Place, Rule, Slot
from shardwise.rules.table import REGISTERED, row_of
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import holds_sparse

__all__ = ["Met", "Prepared", "full_name", "meet", "prepare", "row_name", "tensors_in"]

_Program = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """How a call runs: what its inputs do first, the ops on the blocks, and what the results are.

    `moves` has a plan per tensor, or None where it stays; `programs` what each rank played here runs (a real
    process has one, under None), or None where the op itself runs on the blocks; `outputs` the results' specs.
    """

    moves: tuple[Plan | None, ...]
    programs: dict[int | None, _Program | None] | None
    outputs: tuple[Spec, ...]
    mesh: DeviceMesh
    simulated: bool
    regroups: bool = False  # the result is the first tensor's elements in another shape
    shape: tuple[int, ...] | None = None  # this rank's block of it, then
    alike: frozenset[int] = frozenset()  # outputs that are whole on all ranks, as they come


def prepare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared | None:
    """The recipe of a call, or None if no row covers it."""
    found = tensors_in([*args, *kwargs.values()])
    first = next(t for t in found if isinstance(t, DTensor))
    met = meet(func, args, kwargs, first.device_mesh)
    if met is None:
        return None
    call, rule, results, written = met[:4]
    mesh = first.device_mesh
    layouts = [
        t.layout if isinstance(t, DTensor) else Layout.replicated(t.shape, axes_of(mesh)) for t in found
    ]
    sizes = [t.dtype.itemsize for t in found]
    choice: Choice | None
    if rule is None:
        choice = choose_view(layouts[0], call.outputs[0], sizes[0])
    elif met.makes:
        layouts = [layout.with_partial({}) for layout in layouts]
        choice = Choice(tuple(layouts), tuple(_like(layouts[0], shape) for shape in call.outputs))
    else:
        returned = any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
        fixed = [layouts[i] for i in written] if returned else ()
        choice = choose(rule, layouts, call.outputs, sizes, fixed=fixed, kept=written)
    if choice is None:
        return None
    simulated = isinstance(first._local_tensor, PerRank)
    programs = _programs(call, rule, choice, mesh, simulated)
    if programs is not None and written not in ((), (0,)):
        return None
    outputs = tuple(
        Spec(mesh, layout, meta.dtype, torch.Size(meta.shape), tuple(meta.stride()))
        for layout, meta in zip(choice.outputs, (m for m in results if isinstance(m, Tensor)), strict=True)
    )
    pairs = zip(layouts, choice.inputs, sizes, strict=True)
    moves = tuple(None if a is b else plan_redistribute(a, b, size) for a, b, size in pairs)
    me = None if simulated else coord_of(mesh)
    shape = block_shape(choice.outputs[0], me) if rule is None and me is not None else None
    alike = rule.alike if isinstance(rule, Rule) else frozenset()
    return Prepared(moves, programs, outputs, mesh, simulated, rule is None, shape, alike)


def _like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """How a tensor made after another one lies."""
    return layout if layout.shape == shape else Layout.replicated(shape, layout.axes)


class Met(NamedTuple):
    """A call, its rule (None for a view), what comes out on the meta device, and the tensors it writes to."""

    call: Call
    rule: Rule | Listed | None
    made: list[Tensor | None]
    written: tuple[int, ...]
    makes: bool = False  # a tensor like the first, whose values it does not read


def meet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Met | None:
    """A call as its row sees it, on tensors of any kind; None if no row covers it."""
    name, in_place = row_name(func)
    own = REGISTERED.get(full_name(func))
    row = own or row_of(name)
    if row is None and (name not in REGROUPED or in_place):
        return None
    found = tensors_in([*args, *kwargs.values()])
    if any(map(holds_sparse, found)):
        return None
    results = made_by(func, args, kwargs, told=own is not None)
    if results is None:
        return None
    call = _call(name or full_name(func), func, args, kwargs, found, results)
    if row is None:
        return Met(call, None, results, ())
    written = _written(func, call) if own is not None else (0,) if in_place else ()
    if isinstance(row, Listing):
        return Met(call, listed(row, call, args, kwargs, mesh), results, written)
    rule = row.build(call)
    if rule is None:
        return None
    rule = rule.cast(call)
    return Met(call, rule.writing(written) if own is not None else rule, results, written, row.makes)


def full_name(func: Any) -> str:
    """The name of an op itself, as rows have it.

    >>> full_name(torch.ops.aten.add_.Tensor)
    'aten.add_.Tensor'
    """
    return f"{func._schema.name.replace('::', '.')}.{func._overloadname}"


def row_name(func: Any) -> tuple[str, bool]:
    """The name of the row, and whether the op writes: an in-place op has the row of the one that returns."""
    name, overload = func._schema.name.replace("::", "."), func._overloadname
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return f"{name}.{overload}", False
    if name.endswith("_") and not name.endswith("__"):
        return f"{name[:-1]}.{overload}", True
    return "", True


def _written(func: Any, call: Call) -> tuple[int, ...]:
    """The tensors of a call that the op writes to, by its schema."""
    slots = iter(call.slots())
    out: list[int] = []
    for arg in func._schema.arguments:
        if "Tensor" in str(arg.type):
            here = next(slots)
            out += here if arg.alias_info is not None and arg.alias_info.is_write else ()
    return tuple(out)


def _call(
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[Tensor],
    made: list[Any],
) -> Call:
    numbers = iter(range(len(found)))

    def slotted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Slot(next(numbers))
        if isinstance(value, list | tuple):
            return type(value)(slotted(v) for v in value)
        return value

    given = [slotted(a) for a in args]
    keyed = {k: slotted(v) for k, v in kwargs.items()}
    named: dict[str, Any] = {}
    tensors = []
    for i, arg in enumerate(func._schema.arguments):
        value = given[i] if i < len(given) else keyed.get(arg.name, arg.default_value)
        named[arg.name] = value
        if "Tensor" in str(arg.type):
            tensors.append(tuple(value) if isinstance(value, list) else value)
    return Call(
        name,
        named,
        tuple(tensors),
        tuple(tuple(t.shape) for t in found),
        tuple(tuple(t.shape) for t in made if isinstance(t, Tensor)),
        tuple(isinstance(t, Tensor) for t in made),
        tuple(str(t.dtype).removeprefix("torch.") for t in found),
        tuple(str(t.dtype).removeprefix("torch.") for t in made if isinstance(t, Tensor)),
    )


def _programs(
    call: Call, rule: Rule | Listed | None, choice: Choice, mesh: DeviceMesh, simulated: bool
) -> dict[int | None, _Program | None] | None:
    if isinstance(rule, Listed) or (rule is not None and rule.local is None):
        return None
    places: dict[int | None, Coord] = {}
    if simulated:
        places.update(list(members_of(mesh).items()))
    elif (me := coord_of(mesh)) is not None:
        places[None] = me
    out = {rank: _program(call, rule, choice, coord) for rank, coord in places.items()}
    if all(p is None for p in out.values()):
        return None
    return {rank: None if p is None else _compiled(p) for rank, p in out.items()}


def _program(call: Call, rule: Rule | None, choice: Choice, coord: Coord) -> Local | None:
    shapes = tuple(block_shape(o, coord) for o in choice.outputs)
    if rule is None or rule.local is None:
        seen = Local((("aten.view.default", (Slot(0), list(shapes[0])), {}),))
        is_copy = call.op.split(".")[1].endswith("_copy")
        return Local((*seen.steps, ("aten.clone.default", (Out(0),), {}))) if is_copy else seen
    split = frozenset(
        x
        for said, layout in zip(rule.inputs, choice.inputs, strict=True)
        for x, dim in zip(said, layout.dims, strict=True)
        if x is not None and any(f.axes for f in dim)
    )
    blocks = tuple(block_shape(i, coord) for i in choice.inputs)
    return rule.local(
        call, Place(blocks, shapes, tuple(block_offset(i, coord) for i in choice.inputs), split)
    )


def _compiled(program: Local) -> _Program:
    """A local program as a function of the blocks."""
    steps = [(_op(name), args, kwargs) for name, args, kwargs in program.steps]
    if not program.results and all(_follows(i, step) for i, step in enumerate(program.steps)):
        chain = [(op, args[1:], kwargs) for op, args, kwargs in steps]

        def run_chain(blocks: Sequence[Tensor]) -> Any:
            x = blocks[0]
            for op, rest, named in chain:
                x = op(x, *rest, **named)
            return x

        return run_chain

    def value(arg: Any, blocks: Sequence[Tensor], done: list[Any]) -> Any:
        if isinstance(arg, Slot):
            return blocks[arg.number]
        if isinstance(arg, Out):
            return done[arg.step] if arg.number is None else done[arg.step][arg.number]
        return [value(a, blocks, done) for a in arg] if isinstance(arg, list) else arg

    def run(blocks: Sequence[Tensor]) -> Any:
        done: list[Any] = []
        for op, args, kwargs in steps:
            named = {k: value(a, blocks, done) for k, a in kwargs.items()}
            done.append(op(*(value(a, blocks, done) for a in args), **named))
        return tuple(value(r, blocks, done) for r in program.results) if program.results else done[-1]

    return run


def _follows(number: int, step: tuple[str, tuple[Any, ...], Mapping[str, Any]]) -> bool:
    """Whether a step does something to what the one before it returned, the first to the first block, and reads no more."""
    _, args, kwargs = step
    before: Any = Out(number - 1) if number else Slot(0)
    return bool(args) and args[0] == before and not _reads([*args[1:], *kwargs.values()])


def _reads(value: Any) -> bool:
    """Whether an argument of a step is a block, or what a step returned, or has one in it."""
    return any(_reads(v) for v in value) if isinstance(value, list) else isinstance(value, Slot | Out)


def _op(name: str) -> Callable[..., Any]:
    if name == "aten.view.default":
        return _viewed
    _, packet, overload = name.split(".")
    return binding(getattr(getattr(torch.ops.aten, packet), overload))


def _viewed(block: Tensor, shape: list[int]) -> Tensor:
    """A view where the block's strides allow it: a block may be less contiguous than the whole."""
    try:
        return torch.ops.aten.view.default(block, shape)  # type: ignore[no-any-return]
    except RuntimeError:
        return block.reshape(shape)
