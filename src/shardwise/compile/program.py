"""A captured program: one graph of ops on blocks and collectives, with where its inputs come from and its results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.compile.analysis import Collective, Memory, collectives_of, flops_of, memory_of
from shardwise.compile.errors import CaptureError
from shardwise.compile.lower import compile_graph
from shardwise.compile.numbers import OptimizerNumbers
from shardwise.compile.text import graph_text
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.seeding import settle_stream
from shardwise.torch_internals.pytree import tree_flatten, tree_unflatten
from shardwise.torch_internals.subclass import increment_versions, new_dtensor

__all__ = ["Gradient", "Input", "Output", "Program", "key_of"]


class Input(NamedTuple):
    """An input of the graph: its name for people, and how to read its block, given the arguments of a run."""

    name: str
    read: Callable[[Sequence[Any]], Tensor]
    owner: DTensor | None = None
    """The tensor whose block it is; its versions count the writes of a run."""
    is_written: bool = False


class Output(NamedTuple):
    """A result: the number of the graph's output, with the spec of a DTensor; or a constant."""

    number: int | None
    spec: Spec | None = None
    constant: Any = None


class Gradient(NamedTuple):
    """A gradient that the step leaves in a parameter: the number of the graph's output; None if it leaves none."""

    param: Tensor
    number: int | None
    spec: Spec | None = None


def key_of(leaf: Any) -> Any:
    """What a program depends on of an argument."""
    if isinstance(leaf, DTensor):
        return leaf._spec
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())
    return leaf


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
    has_values: bool = True
    _function: Callable[..., Any] | None = None
    _others: dict[str, Any] = field(default_factory=dict)

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

    def compile(self, backend: str = "inductor") -> Program:
        """The same program, compiled with a backend: "inductor", or "fx" to run the nodes as they are.

        Results of "fx" have the same bits as eager ones; a compiler may round differently.
        """
        if backend not in ("fx", "inductor"):
            raise CaptureError(
                f"There is no backend {backend!r}.",
                why='Programs run as "fx", node by node, or compiled with "inductor".',
                fix='program.compile("inductor")',
            )
        out = Program(
            self.graph, self.mesh, self.coord, self.inputs, self.streams, self.numbers, self.outputs,
            self.structure, self.gradients, self.arguments, self.has_values,
        )  # fmt: skip
        out._function = compile_graph(self.graph, backend)
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
        if structure != self.arguments[1] or [key_of(x) for x in leaves] != self.arguments[0]:
            raise CaptureError(
                "The arguments differ from those of the capture in shape, layout or value.",
                why="A program is for arguments of one kind.",
                fix="Capture another program for them, or use whole_step, which does so itself.",
            )
        return self.run_leaves(leaves)

    def run_leaves(self, leaves: Sequence[Any]) -> Any:
        """Run the step; the leaves of the arguments are known to fit."""
        function = self._function
        if function is None:
            function = self._function = compile_graph(self.graph, "fx")
        numbers, updates = self.numbers.read() if self.numbers is not None else ([], [])
        streams = [settle_stream(mesh) for mesh, _ in self.streams]
        states = [torch.tensor([_signed(s.seed), s.position]) for s in streams]
        values = [i.read(leaves) for i in self.inputs]
        with torch.no_grad():
            results = function(*values, *states, *numbers)
        for stream, (_, count) in zip(streams, self.streams, strict=True):
            stream.position += count
        if self.numbers is not None:
            self.numbers.advance(updates)
        increment_versions([i.owner for i in self.inputs if i.is_written and i.owner is not None])
        for g in self.gradients:
            g.param.grad = None if g.number is None else _tensor(results[g.number], g.spec)
        found = [o.constant if o.number is None else _tensor(results[o.number], o.spec) for o in self.outputs]
        return tree_unflatten(found, self.structure)


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _tensor(block: Tensor, spec: Spec | None) -> Tensor:
    return block if spec is None else new_dtensor(DTensor, block, spec, False)


def module_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters and buffers of modules, by name."""
    found: dict[str, Tensor] = {}
    for m in modules:
        found |= dict(m.named_parameters(remove_duplicate=False)) | dict(m.named_buffers())
    return found
