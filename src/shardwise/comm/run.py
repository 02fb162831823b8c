"""Running plans: over process groups, or over all ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.async_block import Pending
from shardwise.comm.codec import reduce_all, reduce_codec
from shardwise.comm.ledger import Sent, is_counting, record
from shardwise.comm.mesh import (
    Coord,
    PerMesh,
    axes_of,
    coord_of,
    group_of,
    groups_along,
    members_of,
    peers_of,
    siblings_of,
)
from shardwise.comm.per_rank import PerRank
from shardwise.comm.recipe import Recipe, recipe_for
from shardwise.plan import AllReduce, Plan, Step

__all__ = ["run", "start"]

_ready = PerMesh(most=4096)


def run(plan: Plan, block: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take a block, or the blocks of all ranks, through a plan."""
    for go in _closures(plan, block, mesh):
        block = go(block)()
    return block


def start(plan: Plan, block: Tensor, mesh: DeviceMesh) -> Tensor | Pending:
    """Like `run`, but do not wait for the last collective: its value is there when it is first used."""
    closures = _closures(plan, block, mesh)
    last = max((i for i, step in enumerate(plan.steps) if step.is_collective), default=None)
    if last is None or not closures or type(block) is PerRank:
        return run(plan, block, mesh)
    for go in closures[:last]:
        block = go(block)()
    if last == 0 and not isinstance(plan.steps[0], AllReduce):  # which works on a copy anyway
        # the block is the caller's, who may write to it while it is being read
        block = block.clone(memory_format=torch.contiguous_format)
    finish = closures[last](block)

    def wait() -> Tensor:
        out = finish()
        for go in closures[last + 1 :]:
            out = go(out)()
        return out

    return Pending(wait, block.device)


# A closure begins a step and returns what ends it: between the two, other work may run.
_Closure = Callable[[Tensor], Callable[[], Tensor]]


def _closures(plan: Plan, block: Tensor, mesh: DeviceMesh) -> list[_Closure]:
    """The plan compiled for this mesh and dtype; nothing at all on a rank that is not on the mesh."""
    simulated = isinstance(block, PerRank)
    imagined = isinstance(block, PerRank) and next(iter(block._blocks.values())).is_meta

    def make() -> list[_Closure]:
        if simulated:
            play = _imagined if imagined else _simulated
            return [play(step, mesh, block.dtype) for step in plan.steps]
        me = coord_of(mesh)
        return [] if me is None else [_real(step, mesh, me, block.dtype) for step in plan.steps]

    return _ready.get(mesh, (plan, block.dtype, simulated, imagined), make)


def _real(step: Step, mesh: DeviceMesh, me: Coord, dtype: torch.dtype) -> _Closure:
    if not step.is_collective:
        local = recipe_for(step, me, (), dtype).pack
        return lambda block: lambda: local(block)
    group = group_of(mesh, step.axes)
    recipe = recipe_for(step, me, group.peers, dtype)
    call = _CALLS[recipe.call]
    n = len(group.peers)

    def begin(block: Tensor) -> Callable[[], Tensor]:
        wire = recipe.codec.encode(recipe.pack(block)).contiguous()
        if is_counting():
            record(_entry(step, recipe, wire.nbytes))
        coming = call(wire, recipe, n, group.name)

        def finish() -> Tensor:
            received = torch.ops._c10d_functional.wait_tensor(coming)
            return recipe.unpack(recipe.codec.decode(received), block)

        return finish

    return begin


def _all_gather(wire: Tensor, recipe: Recipe, n: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(wire, n, group)  # type: ignore[no-any-return]


def _all_reduce(wire: Tensor, recipe: Recipe, n: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(wire, recipe.codec.op, group)  # type: ignore[no-any-return]


def _reduce_scatter(wire: Tensor, recipe: Recipe, n: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor(  # type: ignore[no-any-return]
        wire, recipe.codec.op, n, group
    )


def _all_to_all(wire: Tensor, recipe: Recipe, n: int, group: str) -> Tensor:
    scale = recipe.codec.scale
    receive, send = [c * scale for c in recipe.receive], [c * scale for c in recipe.send]
    return torch.ops._c10d_functional.all_to_all_single(wire, receive, send, group)  # type: ignore[no-any-return]


_CALLS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _entry(step: Step, recipe: Recipe, nbytes: int) -> Sent:
    """What one rank sends, by the ring that each collective is modelled on."""
    n = step.group_size
    share = {
        "all_gather": Fraction(n - 1),
        "all_reduce": Fraction(2 * (n - 1), n),
        "reduce_scatter": Fraction(n - 1, n),
        "all_to_all": Fraction(1),
    }[recipe.call]
    return Sent(step.name, recipe.call, step.source.axes.names_of(step.axes), n, share * nbytes)


def _simulated(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Closure:
    members, sizes = members_of(mesh), axes_of(mesh).sizes
    if not step.is_collective:
        local = {r: recipe_for(step, c, (), dtype).pack for r, c in members.items()}
        return lambda block: lambda: PerRank({r: fn(_block(block, r)) for r, fn in local.items()})
    peers = {r: peers_of(c, step.axes, sizes) for r, c in members.items()}
    recipes = {r: recipe_for(step, c, peers[r], dtype) for r, c in members.items()}
    groups = groups_along(mesh, step.axes)

    def begin(block: Tensor) -> Callable[[], Tensor]:
        wires = {r: recipe.codec.encode(recipe.pack(_block(block, r))) for r, recipe in recipes.items()}
        if is_counting():
            entries = [_entry(step, recipes[r], wire.nbytes) for r, wire in wires.items()]
            first = entries[0]
            total = sum((e.bytes for e in entries), Fraction(0))
            record(Sent(first.step, first.called, first.axes, first.group_size, total))
        out = {}
        for group in groups:
            received = _exchange([recipes[r] for r in group], [wires[r] for r in group])
            for r, wire in zip(group, received, strict=True):
                recipe = recipes[r]
                out[r] = recipe.unpack(recipe.codec.decode(wire), _block(block, r))
        result = PerRank({r: out[r] for r in members})
        return lambda: result

    return begin


def _imagined(step: Step, mesh: DeviceMesh, dtype: torch.dtype) -> _Closure:
    """A step on meta tensors: shapes follow from the layout and bytes from the plan, so no rank need be played."""
    shapes = {r: step.shape_at(c) for r, c in members_of(mesh).items()}
    entry = None
    if step.is_collective:
        me = next(iter(members_of(mesh).values()))
        probe = torch.empty(8, dtype=dtype, device="meta")
        uneven = len(set(shapes.values())) > 1
        ops = ["sum" if op == "avg" else op for op in step.reduced.values()]
        if uneven and any(reduce_codec(dtype, op).encode(probe).nbytes != probe.nbytes for op in ops):
            # what is reduced in a wider dtype goes as itself in the groups whose blocks are uneven
            return _simulated(step, mesh, dtype)
        recipe = recipe_for(step, me, peers_of(me, step.axes, axes_of(mesh).sizes), dtype)
        width = recipe.codec.encode(probe).nbytes // 8
        sent = Fraction(step.elements * width * len(siblings_of(mesh)))
        names = step.source.axes.names_of(step.axes)
        entry = Sent(step.name, recipe.call, names, step.group_size, sent)

    def begin(block: Tensor) -> Callable[[], Tensor]:
        if entry is not None and is_counting():
            record(entry)
        result = PerRank({r: torch.empty(s, dtype=dtype, device="meta") for r, s in shapes.items()})
        return lambda: result

    return begin


def _block(blocks: Tensor, rank: int) -> Tensor:
    return blocks._blocks[rank] if isinstance(blocks, PerRank) else blocks


def _exchange(recipes: list[Recipe], wires: list[Tensor]) -> list[Tensor]:
    """What each rank of one group receives."""
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
    if math.prod(wires[0].shape) == 0:
        return wires[0].clone()
    return reduce_all(wires, op)
