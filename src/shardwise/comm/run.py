"""Running plans: over process groups, or for all ranks of a simulation in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.async_block import Pending
from shardwise.comm.codec import reduce_all, reduce_codec
from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import (
    PerMesh,
    coord_of,
    group_of,
    groups_along,
    members_of,
    siblings_of,
)
from shardwise.comm.per_rank import PerRank
from shardwise.comm.recipe import Recipe, as_received, recipe_for
from shardwise.comm.recording import recorders
from shardwise.comm.simulate import at_simulation_end
from shardwise.comm.symbolic_step import define_steps, depends_on_sizes, step_at_run_time
from shardwise.layout import dtype_text
from shardwise.layout.sizes import at_new_symbols
from shardwise.plan import AllReduce, Plan, Step
from shardwise.torch_internals.collectives import (
    Note,
    all_gather,
    all_reduce,
    all_to_all,
    note_of,
    reduce_scatter,
    wait,
)
from shardwise.torch_internals.dispatcher import below_autograd

__all__ = ["all_ranks_stage", "entry_of", "real_stage", "run", "start"]

_Stage = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""A compiled step: a function that starts it, and one that completes it, given the first one's result and the block."""

_programs = PerMesh(most=4096)
at_simulation_end(_programs.clear)
_symbolic_programs = PerMesh(most=4096)
at_new_symbols.append(_symbolic_programs.clear)


def run(plan: Plan, block: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take a block, or the blocks of all ranks of a simulation, through a plan."""
    for begin, finish in _program(plan, block, mesh):
        block = finish(begin(block), block)
    return block


def start(plan: Plan, block: Tensor, mesh: DeviceMesh) -> Tensor | Pending:
    """Like `run`, but return a `Pending` that waits for the last collective, if there is one."""
    program = _program(plan, block, mesh)
    last = max((i for i, step in enumerate(plan.steps) if step.is_collective), default=None)
    if last is None or not program or type(block) is PerRank or recorders:
        return run(plan, block, mesh)
    for begin, finish in program[:last]:
        block = finish(begin(block), block)
    if last == 0 and not isinstance(plan.steps[0], AllReduce):  # which copies its input
        # the caller may write to the block while it is being sent
        block = block.clone(memory_format=torch.contiguous_format)
    begin, complete = program[last]
    coming = begin(block)
    is_block = last + 1 == len(program) and _is_received_as_it_is(plan.steps[last], mesh, block.dtype)

    def wait_and_go_on() -> Tensor:
        out = complete(coming, block)
        for begin, finish in program[last + 1 :]:
            out = finish(begin(out), out)
        return out

    return Pending(wait_and_go_on, block.device, coming if is_block else None)


def _is_received_as_it_is(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Whether a collective writes the target block of this rank itself."""
    recipe = recipe_for(step, coord_of(mesh) or (), dtype)
    return recipe.codec.is_identity and recipe.unpack is as_received


def _program(plan: Plan, block: Tensor, mesh: DeviceMesh) -> tuple[_Stage, ...]:
    """The plan compiled for this mesh and dtype; empty on a rank that is not on the mesh."""
    compiler = _recorded if recorders else real_stage
    if type(block) is PerRank:
        compiler = _dry_run if next(iter(block._blocks.values())).is_meta else all_ranks_stage
    key = (plan, block.dtype, compiler)
    program: tuple[_Stage, ...] | None = _programs.find(mesh, key)
    if program is None:
        dtype = block.dtype
        is_here = compiler is not real_stage or coord_of(mesh) is not None
        steps = plan.steps if is_here else ()
        kept = _symbolic_programs if plan.source.is_symbolic else _programs
        program = kept.get(mesh, key, lambda: tuple(compiler(step, mesh, dtype) for step in steps))
    return program


def _as_begun(coming: Tensor, block: Tensor) -> Tensor:
    return coming


def real_stage(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Stage:
    """A step on this rank of a process group."""
    if depends_on_sizes(step):
        group = group_of(mesh, step.axes).name if step.is_collective else ""
        return step_at_run_time(step, mesh, group), _as_begun
    recipe = recipe_for(step, coord_of(mesh) or (), dtype)
    if not step.is_collective:
        return recipe.pack, _as_begun
    note = note_of(f"{step} {dtype_text(dtype)}")
    call = _collective(recipe, group_of(mesh, step.axes).name, step.group_size, note)
    pack, unpack, decode = recipe.pack, recipe.unpack, recipe.codec.decode
    encode = recipe.codec.encode

    def begin(block: Tensor) -> Tensor:
        wire = encode(pack(block))
        if is_counting():
            record(entry_of(step, recipe, wire))
        with below_autograd():  # where torch has a kernel in Python for each functional collective
            return call(wire)

    def finish(coming: Tensor, block: Tensor) -> Tensor:
        with below_autograd():
            received = wait(coming)
        return unpack(decode(received), block)

    return begin, finish


def _recorded(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Stage:
    """A step of a program that is being captured."""
    return (lambda block: recorders[-1].move(step, block, mesh)), _as_begun


def _collective(recipe: Recipe, group: str, size: int, note: Note) -> Callable[[Tensor], Tensor]:
    op, scale = recipe.codec.op, recipe.codec.scale
    match recipe.call:
        case "all_gather":
            return lambda wire: all_gather(wire, size, group, note)
        case "all_reduce":
            return lambda wire: all_reduce(wire, op, group, note)
        case "reduce_scatter":
            return lambda wire: reduce_scatter(wire, op, size, group, note)
        case _:
            receive, send = [n * scale for n in recipe.receive], [n * scale for n in recipe.send]
            return lambda wire: all_to_all(wire, receive, send, group, note)


def entry_of(step: Step, recipe: Recipe, wire: Tensor) -> Sent:
    """The bytes that one rank sends, by the ring algorithm of each collective."""
    n = step.group_size
    match recipe.call:
        case "all_gather":
            sent = Fraction((n - 1) * wire.nbytes)
        case "all_reduce":
            sent = Fraction(2 * (n - 1) * wire.nbytes, n)
        case "reduce_scatter":
            sent = Fraction((n - 1) * wire.nbytes, n)
        case _:
            sent = Fraction(recipe.sent * recipe.codec.scale * wire.itemsize)
    return Sent(step.name, recipe.call, step.source.axes.names_of(step.axes), n, sent)


def all_ranks_stage(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Stage:
    """A step on all ranks of a simulation."""
    members = members_of(mesh)
    recipes = {r: recipe_for(step, c, dtype) for r, c in members.items()}
    if not step.is_collective:
        return lambda block: PerRank({r: x.pack(_block(block, r)) for r, x in recipes.items()}), _as_begun
    groups = groups_along(mesh, step.axes)

    def run_collective(block: Tensor) -> Tensor:
        wires = {r: recipe.codec.encode(recipe.pack(_block(block, r))) for r, recipe in recipes.items()}
        if is_counting():
            entries = [entry_of(step, recipes[r], wire) for r, wire in wires.items()]
            record(replace(entries[0], bytes=sum((e.bytes for e in entries), Fraction(0))))
        out = {}
        for group in groups:
            received = _exchange([recipes[r] for r in group], [wires[r] for r in group])
            for r, wire in zip(group, received, strict=True):
                recipe = recipes[r]
                out[r] = recipe.unpack(recipe.codec.decode(wire), _block(block, r))
        return PerRank({r: out[r] for r in members})

    return run_collective, _as_begun


def _dry_run(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Stage:
    """A step on the meta tensors of a simulation: shapes follow from the layouts and bytes from the plan."""
    shapes = {r: step.shape_at(c) for r, c in members_of(mesh).items()}
    entry = None
    if step.is_collective:
        probe = torch.empty(8, dtype=dtype, device="meta")
        uneven = len(set(shapes.values())) > 1
        ops = ["sum" if op == "avg" else op for op in step.reduced.values()]
        if uneven and any(reduce_codec(dtype, op).encode(probe).nbytes != probe.nbytes for op in ops):
            # groups of even blocks reduce in the wider dtype of the codec, groups of uneven ones send their own
            return all_ranks_stage(step, mesh, dtype)
        recipe = recipe_for(step, next(iter(members_of(mesh).values())), dtype)
        width = recipe.codec.encode(probe).nbytes // 8
        sent = Fraction(step.elements * width * len(siblings_of(mesh)))
        names = step.source.axes.names_of(step.axes)
        entry = Sent(step.name, recipe.call, names, step.group_size, sent)

    def infer_blocks(block: Tensor) -> Tensor:
        if entry is not None and is_counting():
            record(entry)
        return PerRank({r: torch.empty(s, dtype=dtype, device="meta") for r, s in shapes.items()})

    return infer_blocks, _as_begun


def _block(blocks: Tensor, rank: int) -> Tensor:
    return blocks._blocks[rank] if isinstance(blocks, PerRank) else blocks


def _exchange(recipes: list[Recipe], wires: list[Tensor]) -> list[Tensor]:
    """What each rank of one group receives, given what each sends."""
    first = recipes[0]
    match first.call:
        case "all_gather":
            return [torch.cat(wires) for _ in wires]
        case "all_reduce":
            return [_reduced(wires, first.codec.op) for _ in wires]
        case "reduce_scatter":
            return list(_reduced(wires, first.codec.op).chunk(len(wires)))
        case _:
            scale = first.codec.scale
            parts = [w.split([n * scale for n in r.send]) for w, r in zip(wires, recipes, strict=True)]
            return [torch.cat([p[i] for p in parts]) for i in range(len(wires))]


def _reduced(wires: list[Tensor], op: str) -> Tensor:
    return reduce_all(wires, op) if wires[0].numel() else wires[0].clone()


define_steps(run)
