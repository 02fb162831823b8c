"""A captured program: one graph of ops on blocks and collectives, with where its inputs come from and its results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import PerRank, first_rank, is_simulated, members_of
from shardwise.compile.analysis import Collective, Memory, collectives_of, flops_of, memory_of
from shardwise.compile.errors import CaptureError
from shardwise.compile.lockstep import run_all_ranks
from shardwise.compile.lower import compile_graph
from shardwise.compile.numbers import OptimizerNumbers
from shardwise.compile.owners import Find, Input, block_of_tensor
from shardwise.compile.passes import EXACT, Passes
from shardwise.compile.signature import keys_of
from shardwise.compile.text import graph_text
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.seeding import settle_stream
from shardwise.torch_internals.pytree import tree_flatten, tree_unflatten
from shardwise.torch_internals.subclass import increment_versions, new_dtensor

__all__ = ["Gradient", "Output", "Program"]


class Output(NamedTuple):
    """A result: the number of the graph's output, with the spec of a DTensor; or a constant."""

    number: int | None
    spec: Spec | None = None
    constant: Any = None


class Gradient(NamedTuple):
    """A gradient that the step leaves in a tensor: the number of the graph's output; None if it leaves none."""

    name: str
    find: Find
    number: int | None
    spec: Spec | None = None

    def set(self, x: Tensor, results: Sequence[Tensor]) -> None:
        """Let a tensor have the gradient, given the results of a run."""
        grad = None if self.number is None else _tensor(results[self.number], self.spec)
        # a plain parameter is the same on all ranks of a simulation, and so is its gradient
        x.grad = first_rank(grad) if isinstance(grad, PerRank) and not isinstance(x, PerRank) else grad


@dataclass(eq=False)
class Program:
    """A step as one graph of ops on the blocks of one rank and of collectives; see `capture`.

    Attributes:
        graph: the graph; nothing of the tensor class is left in it.
        mesh: the mesh of the tensors; None if there is none among the inputs.
        coord: the coord on the mesh whose program it is.
    """

    graph: fx.Graph
    mesh: DeviceMesh | None
    coord: tuple[int, ...]
    inputs: list[Input]
    streams: list[tuple[DeviceMesh, int]]
    numbers: OptimizerNumbers | None
    outputs: list[Output]
    structure: Any
    gradients: list[Gradient]
    arguments: tuple[list[Any], Any]
    """The keys of the arguments' leaves, and their structure."""
    fixed_ids: set[int] = field(default_factory=set)
    """The ids of the tensors of modules and of the optimizer."""
    has_values: bool = True
    has_overlap: bool = False
    """Whether an input that is written to shares memory with another: then nodes stay in their order."""
    capture_at: Callable[[int], Program] | None = None
    """Captures the program of another rank."""
    passes: dict[str, int] = field(default_factory=dict)
    """What the passes of `optimize` did: the collectives that each saved, or overlaps with other work."""
    _function: Callable[..., Any] | None = None
    _others: dict[int, Program] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Program of {len(self.graph.nodes)} nodes, {len(self.collectives)} collectives, for coord {self.coord}"

    def print(self) -> None:
        """Print the graph, one line per node, with shapes, layouts and source lines of collectives."""
        print(self.text())  # noqa: T201

    def text(self) -> str:
        """What `print` prints."""
        return graph_text(self.graph)

    @property
    def collectives(self) -> list[Collective]:
        """The collectives in the order in which they run, with axes, bytes that leave this rank, layouts and source line."""
        return collectives_of(self.graph)

    @property
    def bytes(self) -> Fraction:
        """The bytes that leave this rank in a run."""
        return sum((c.bytes for c in self.collectives), Fraction(0))

    def memory(self) -> Memory:
        """The bytes of blocks that are alive at a time in a run."""
        return memory_of(self.graph)

    def flops(self) -> int:
        """The floating point operations of matrix products, convolutions and attention on this rank."""
        return flops_of(self.graph)

    def for_rank(self, rank: int) -> Program:
        """The program of another rank of the mesh, with blocks of its own sizes and its own parts of masks and random numbers.

        It is captured from the same step the first time, and kept. Nothing is communicated.

        >>> import shardwise as sw
        >>> with sw.compile.fake_mesh((4,), ("tp",)) as mesh:
        ...     x = sw.empty(5, device_mesh=mesh, placements=[sw.Shard(0)])
        ...     program = sw.compile.capture(lambda x: x * 2, x)
        ...     [program.for_rank(r).memory().inputs for r in range(4)]
        [8, 8, 4, 0]
        """
        if self.mesh is None or self.capture_at is None or members_of(self.mesh).get(rank) == self.coord:
            return self
        if rank not in self._others:
            self._others[rank] = self.capture_at(rank)
        return self._others[rank]

    def for_coord(self, coord: Sequence[int]) -> Program:
        """The program of the rank at another coord of the mesh; see `for_rank`."""
        wanted = tuple(coord)
        ranks = {c: r for r, c in members_of(self.mesh).items()} if self.mesh is not None else {}
        if wanted not in ranks:
            raise CaptureError(
                f"The mesh has no coord {wanted}.",
                why=f"Its axes are {dict(zip(*_axes(self.mesh), strict=True))}.",
                fix=f"program.for_coord({self.coord})",
            )
        return self.for_rank(ranks[wanted])

    def compile(self, backend: str = "inductor") -> Program:
        """The same program, compiled with a backend: "inductor", or "fx" to run the nodes as they are.

        Results of "fx" have the same bits as eager ones; a compiler may round differently. Parameters and states of the optimizer
        are updated in place either way.

        Raises:
            CaptureError: there is no such backend, the program has no values to compile for, or tensors that it writes to share
                memory with others.
        """
        if self.has_overlap and backend != "fx":
            raise CaptureError(
                "An input that the program writes to shares memory with another one.",
                why="A compiler reorders reads and writes of tensors that it takes for separate.",
                fix='program.compile("fx"), or pass tensors of their own memory.',
            )
        out = replace(self, _others={})
        out._function = compile_graph(self.graph, backend)
        return out

    def optimize(self, passes: Passes = EXACT) -> Program:
        """The same program with fewer collectives, which overlap with other work.

        Args:
            passes: what to do; by default everything that keeps the bits of the results. A program whose inputs share memory that
                it writes to stays as it is.
        """
        if self.has_overlap:
            return self
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        at = self.capture_at
        again = None if at is None else lambda rank: at(rank).optimize(passes)
        out = replace(self, graph=graph, capture_at=again, _function=None, _others={})
        out.passes = passes.apply(graph)
        return out

    def run(self, *args: Any) -> Any:
        """Run the step on this rank, with arguments like those of the capture; state is read and written where it is.

        Communicates what `collectives` lists.
        """
        if not self.has_values:
            raise CaptureError(
                "The program was captured from tensors without values.",
                why="There is nothing to compute with.",
                fix="Capture it on the real ranks to run it; here print() it, or ask for memory() and flops().",
            )
        leaves, structure = tree_flatten(args)
        known = {id(x) for x in leaves} & self.fixed_ids
        if structure != self.arguments[1] or keys_of(leaves, known) != self.arguments[0]:
            raise CaptureError(
                "The arguments differ from those of the capture in shape, layout, value, or in which of them are the same tensor.",
                why="A program is for arguments of one kind.",
                fix="Capture another program for them, or use whole_step, which does so itself.",
            )
        return self.run_leaves(leaves)

    def run_leaves(self, leaves: Sequence[Any]) -> Any:
        """Run the step; the leaves of the arguments are known to fit."""
        numbers, updates = self.numbers.read() if self.numbers is not None else ([], [])
        streams = [settle_stream(mesh) for mesh, _ in self.streams]
        states = [torch.tensor([_signed(s.seed), s.position]) for s in streams]
        owners = [i.find(leaves) for i in self.inputs]
        with torch.no_grad():
            results = self._call(leaves, [block_of_tensor(x) for x in owners], [*states, *numbers])
        for mesh, count in self.streams:
            settle_stream(mesh).position += count
        if self.numbers is not None:
            self.numbers.advance(updates)
        pairs = zip(self.inputs, owners, strict=True)
        increment_versions([x for i, x in pairs if i.is_written and isinstance(x, DTensor)])
        for g in self.gradients:
            g.set(g.find(leaves), results)
        found = [o.constant if o.number is None else _tensor(results[o.number], o.spec) for o in self.outputs]
        return tree_unflatten(found, self.structure)

    def _call(self, leaves: Sequence[Any], blocks: list[Tensor], others: list[Any]) -> Sequence[Tensor]:
        if is_simulated() and self.mesh is not None:
            programs = {r: self.for_rank(r) for r in members_of(self.mesh)}
            own = {r: [i.read(leaves) for i in p.inputs] for r, p in programs.items()}
            return run_all_ranks({r: p.graph for r, p in programs.items()}, own, others)
        function = self._function
        if function is None:
            function = self._function = compile_graph(self.graph, "fx")
        return function(*blocks, *others)  # type: ignore[no-any-return]


def _axes(mesh: DeviceMesh | None) -> tuple[Sequence[str], Sequence[int]]:
    return ((), ()) if mesh is None else (mesh.mesh_dim_names or (), mesh.shape)


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _tensor(block: Tensor, spec: Spec | None) -> Tensor:
    return block if spec is None else new_dtensor(DTensor, block, spec, False)
