"""What a program sends, holds and computes, read off its graph."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from shardwise.compile.targets import Begin, Move, MoveMany
from shardwise.torch_internals.collectives import collective_name
from shardwise.torch_internals.subclass import storage_id

__all__ = ["Collective", "Memory", "collectives_of", "flops_of", "memory_of"]


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    `kind` is the name of the plan's step, `bytes` are those that leave this rank, by the ring algorithm of each collective;
    `layouts` has a line for each tensor, `line` is the line of the program that asked for it; backward passes have that of
    `backward()`.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: Fraction
    layouts: tuple[str, ...]
    section: str
    line: str
    grouped: bool = False

    def __str__(self) -> str:
        what = self.layouts[0] if len(self.layouts) == 1 else f"{len(self.layouts)} tensors"
        return f"{self.kind} over {','.join(self.axes)}: {what}   {float(self.bytes):,.0f} B   {self.section}   {self.line}"


@dataclass(frozen=True)
class Memory:
    """Bytes of blocks on one rank: the inputs of a run, and the most that is alive at a time, inputs included."""

    inputs: int
    peak: int
    at: str
    """The node at which most is alive."""


def _move_of(target: Any) -> Move | MoveMany | None:
    if isinstance(target, Begin):
        return target.move
    return target if isinstance(target, Move | MoveMany) else None


def collectives_of(graph: fx.Graph) -> list[Collective]:
    """The collectives of a graph in their order."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        move = _move_of(node.target)
        where = (node.meta.get("section", ""), node.meta.get("line", ""))
        if move is not None and move.is_collective:
            found.append(_collective(move, where))
        elif move is None and (name := collective_name(node.target)) and "wait" not in name:
            value = node.args[0].meta["val"]
            found.append(Collective(name, (), 0, Fraction(value.nbytes), (str(tuple(value.shape)),), *where))
    return found


def _collective(move: Move | MoveMany, where: tuple[str, str]) -> Collective:
    entry = move.sent()
    steps = [move.step] if isinstance(move, Move) else [m.step for m in move.step.members]
    layouts = tuple(f"{step.source} -> {step.target}" for step in steps)
    return Collective(
        entry.step, entry.axes, entry.group_size, entry.bytes, layouts, *where, grouped=entry.grouped
    )


def flops_of(graph: fx.Graph) -> int:
    """The floating point operations of the ops that torch has formulas for."""
    total = 0
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op != "call_function" or packet not in flop_registry:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        total += flop_registry[packet](*args, **kwargs, out_val=node.meta["val"])
    return int(total)


def _storages(node: fx.Node) -> dict[int, int]:
    """The memory that the value of a node refers to, with its bytes."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return {storage_id(t): t.untyped_storage().nbytes() for t in parts if isinstance(t, Tensor)}


def memory_of(graph: fx.Graph) -> Memory:
    """The bytes that are alive at a time, if each value is freed after its last use."""
    last: dict[int, fx.Node] = {}
    sizes: dict[int, int] = {}
    inputs: set[int] = set()
    for node in graph.nodes:
        for n in (node, *node.all_input_nodes):
            for storage, size in _storages(n).items():
                last[storage], sizes[storage] = node, size
        if node.op == "placeholder":
            inputs |= _storages(node).keys()
    ends: dict[fx.Node, list[int]] = {}
    for storage, node in last.items():
        if storage not in inputs:
            ends.setdefault(node, []).append(storage)
    held = sum(sizes[s] for s in inputs)
    start, peak, at = held, held, ""
    alive = set(inputs)
    for node in graph.nodes:
        for storage in _storages(node):
            if storage not in alive:
                alive.add(storage)
                held += sizes[storage]
        if held > peak:
            peak, at = held, node.name
        for storage in ends.get(node, ()):
            if storage in alive:
                alive.discard(storage)
                held -= sizes[storage]
    return Memory(start, peak, at)
