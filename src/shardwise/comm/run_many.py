"""Running grouped plans: over process groups, or for all ranks of a simulation in this process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.codec import reduce_all
from shardwise.comm.grouped_recipe import GroupedRecipe, grouped_recipe_for
from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import PerMesh, coord_of, group_of, groups_along, members_of
from shardwise.comm.per_rank import PerRank
from shardwise.comm.recording import recorders
from shardwise.comm.simulate import at_simulation_end
from shardwise.layout import dtype_text
from shardwise.layout.sizes import at_new_symbols
from shardwise.plan import GroupedPlan, GroupedStep
from shardwise.torch_internals.collectives import (
    Note,
    all_gather,
    all_reduce,
    all_reduce_in_place,
    all_to_all,
    note_of,
    reduce_scatter,
    wait,
)

__all__ = ["PendingBlocks", "all_ranks_stage", "entry_of", "real_stage", "run_many", "start_many"]

_Blocks = list[Tensor]
_Stage = tuple[Callable[[_Blocks], Tensor], Callable[[Tensor, Sequence[Tensor]], _Blocks]]
"""A compiled step: a function that starts it, and one that completes it, given the first one's result and the blocks.

Only local steps need the blocks to complete.
"""

_programs = PerMesh(most=1024)
at_simulation_end(_programs.clear)
_symbolic_programs = PerMesh(most=1024)
at_new_symbols.append(_symbolic_programs.clear)


class PendingBlocks:
    """The blocks of a grouped move that has been started. `wait` completes it, once."""

    __slots__ = ("_blocks", "_finish")

    def __init__(self, finish: Callable[[], _Blocks]) -> None:
        self._finish: Callable[[], _Blocks] | None = finish
        self._blocks: _Blocks | None = None

    @classmethod
    def completed(cls, blocks: _Blocks) -> PendingBlocks:
        """Blocks that have already arrived."""
        out = cls(lambda: blocks)
        out.wait()
        return out

    @property
    def is_complete(self) -> bool:
        """Whether the blocks have arrived and been unpacked."""
        return self._blocks is not None

    def wait(self) -> _Blocks:
        """The blocks, after the collective has completed."""
        if self._blocks is None:
            finish, self._finish = self._finish, None  # it holds the source blocks
            if finish is None:
                raise RuntimeError("the grouped move failed when it was waited for the first time")
            self._blocks = finish()
        return self._blocks


def run_many(plan: GroupedPlan, blocks: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Take blocks, or the blocks of all ranks of a simulation, through a grouped plan.

    Results of one collective are views of one buffer. A tensor that stays is returned as it is.
    """
    return _complete(plan, list(blocks), _program(plan, blocks, mesh), 0)


def start_many(plan: GroupedPlan, blocks: Sequence[Tensor], mesh: DeviceMesh) -> PendingBlocks:
    """Like `run_many`, but only start the last collective; the caller may write to the blocks meanwhile."""
    program = _program(plan, blocks, mesh)
    last = plan.last_collective
    if last is None or not program or type(blocks[0]) is PerRank or recorders:
        return PendingBlocks.completed(_complete(plan, list(blocks), program, 0))
    if plan.is_one_step:
        begin, finish = program[0]
        coming = begin(list(blocks))
        return PendingBlocks(lambda: finish(coming, ()))
    out = _complete(plan, list(blocks), program[:last], 0)
    members = [m.tensor for m in plan.steps[last].members]
    sources = [out[i] for i in members]
    begin, finish = program[last]
    coming = begin(sources)
    for (
        i
    ) in members:  # the blocks are packed: holding them until the collective is complete would cost memory
        out[i] = coming

    def wait_and_go_on() -> _Blocks:
        for i, block in zip(members, finish(coming, ()), strict=True):
            out[i] = block
        return _complete(plan, out, program, last + 1)

    return PendingBlocks(wait_and_go_on)


def _complete(plan: GroupedPlan, blocks: _Blocks, program: Sequence[_Stage], first: int) -> _Blocks:
    for step, (begin, finish) in zip(plan.steps[first:], program[first:], strict=False):
        sources = [blocks[m.tensor] for m in step.members]
        for m, block in zip(step.members, finish(begin(sources), sources), strict=True):
            blocks[m.tensor] = block
    return blocks


def _program(plan: GroupedPlan, blocks: Sequence[Tensor], mesh: DeviceMesh) -> tuple[_Stage, ...]:
    """The plan compiled for this mesh; empty on a rank that is not on the mesh."""
    if not plan.steps:
        return ()
    compiler = all_ranks_stage if type(blocks[0]) is PerRank else _recorded if recorders else real_stage
    key = (plan, compiler)
    program: tuple[_Stage, ...] | None = _programs.find(mesh, key)
    if program is None:
        is_here = compiler is all_ranks_stage or coord_of(mesh) is not None
        steps = [(s, [plan.items[m.tensor].dtype for m in s.members]) for s in plan.steps if is_here]
        kept = _symbolic_programs if plan.is_symbolic else _programs
        program = kept.get(mesh, key, lambda: tuple(compiler(s, mesh, dtypes) for s, dtypes in steps))
    return program


def real_stage(step: GroupedStep, mesh: DeviceMesh, dtypes: list[torch.dtype]) -> _Stage:
    """A grouped step on this rank of a process group."""
    recipe = grouped_recipe_for(step, coord_of(mesh) or (), dtypes)
    if not step.is_collective:
        return recipe.pack, recipe.unpack
    note = note_of(_text(step, dtypes))
    call = _collective(recipe, group_of(mesh, step.axes).name, step.group_size, note)
    pack, unpack, (encode, decode, *_) = recipe.pack, recipe.unpack, recipe.codec

    def begin(blocks: _Blocks) -> Tensor:
        wire = encode(pack(blocks))
        if is_counting():
            record(entry_of(step, recipe, wire))
        return call(wire)

    def finish(coming: Tensor, blocks: Sequence[Tensor]) -> _Blocks:
        return unpack(decode(wait(coming)), blocks)

    return begin, finish


def _recorded(step: GroupedStep, mesh: DeviceMesh, dtypes: list[torch.dtype]) -> _Stage:
    """A grouped step of a program that is being captured."""
    return (lambda blocks: blocks[0]), lambda _, blocks: recorders[-1].move_many(step, blocks, mesh)


def _text(step: GroupedStep, dtypes: list[torch.dtype]) -> str:
    """What a grouped collective is about: its first tensors, and a number that stands for all of them."""
    every = [f"{m.step} {dtype_text(d)}" for m, d in zip(step.members, dtypes, strict=True)]
    more = f", and {len(every) - 1} more (number {zlib.crc32(','.join(every).encode())})"
    return f"grouped {every[0]}{more if len(every) > 1 else ''}"


def _collective(recipe: GroupedRecipe, group: str, size: int, note: Note) -> Callable[[Tensor], Tensor]:
    op = recipe.codec.op
    match recipe.call:
        case "all_gather":
            return lambda wire: all_gather(wire, size, group, note)
        case "all_reduce":
            # the packed buffer belongs to this step; tensors of a trace must not be written to
            return lambda wire: (
                all_reduce_in_place(wire, op, group, note)
                if type(wire) is Tensor
                else all_reduce(wire, op, group, note)
            )
        case "reduce_scatter":
            return lambda wire: reduce_scatter(wire, op, size, group, note)
        case _:
            receive, send = list(recipe.receive), list(recipe.send)
            return lambda wire: all_to_all(wire, receive, send, group, note)


def _sent(step: GroupedStep, recipe: GroupedRecipe, wire: Tensor) -> Fraction:
    """The bytes that one rank sends, by the ring algorithm of each collective."""
    n = step.group_size
    match recipe.call:
        case "all_gather":
            return Fraction((n - 1) * wire.nbytes)
        case "all_reduce":
            return Fraction(2 * (n - 1) * wire.nbytes, n)
        case "reduce_scatter":
            return Fraction((n - 1) * wire.nbytes, n)
        case _:
            return Fraction(recipe.sent)


def _entry(step: GroupedStep, recipe: GroupedRecipe, sent: Fraction) -> Sent:
    axes = step.members[0].step.source.axes.names_of(step.axes)
    return Sent(step.kind, recipe.call, axes, step.group_size, sent, grouped=True)


def entry_of(step: GroupedStep, recipe: GroupedRecipe, wire: Tensor) -> Sent:
    """What one rank sends, given the tensor that it sends."""
    return _entry(step, recipe, Fraction(_sent(step, recipe, wire)))


def all_ranks_stage(step: GroupedStep, mesh: DeviceMesh, dtypes: list[torch.dtype]) -> _Stage:
    """A grouped step on all ranks of a simulation."""
    members = members_of(mesh)
    recipes = {r: grouped_recipe_for(step, c, dtypes) for r, c in members.items()}
    groups = groups_along(mesh, step.axes) if step.is_collective else []

    def complete(_: Tensor, blocks: Sequence[Tensor]) -> _Blocks:
        mine = {r: [_block(b, r) for b in blocks] for r in recipes}
        wires = {r: recipe.codec.encode(recipe.pack(mine[r])) for r, recipe in recipes.items() if groups}
        if wires and is_counting():
            sent = sum((_sent(step, recipes[r], wire) for r, wire in wires.items()), Fraction(0))
            record(_entry(step, next(iter(recipes.values())), sent))
        for group in groups:
            received = _exchange([recipes[r] for r in group], [wires[r] for r in group])
            wires |= dict(zip(group, received, strict=True))
        out = {}
        for r, recipe in recipes.items():
            out[r] = recipe.unpack(recipe.codec.decode(wires[r]) if groups else mine[r][0], mine[r])
        return [PerRank({r: found[i] for r, found in out.items()}) for i in range(len(blocks))]

    return lambda blocks: blocks[0], complete


def _block(blocks: Tensor, rank: int) -> Tensor:
    return blocks._blocks[rank] if isinstance(blocks, PerRank) else blocks


def _exchange(recipes: list[GroupedRecipe], wires: list[Tensor]) -> list[Tensor]:
    """What each rank of one group receives, given what each sends."""
    first = recipes[0]
    match first.call:
        case "all_gather":
            return [torch.cat(wires) for _ in wires]
        case "all_reduce":
            return [reduce_all(wires, first.codec.op) for _ in wires]
        case "reduce_scatter":
            # clones: a rank that writes to its result must not write to that of another
            return [part.clone() for part in reduce_all(wires, first.codec.op).chunk(len(wires))]
        case _:
            parts = [w.split(list(r.send)) for w, r in zip(wires, recipes, strict=True)]
            return [torch.cat([p[i] for p in parts]) for i in range(len(wires))]
