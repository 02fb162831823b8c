"""Compiling a captured graph with inductor.

The graph is traced again down to plain ops: steps of plans become packing, a functional collective and unpacking, which inductor
fuses with their surroundings. The numbers of the optimizer, which change from step to step, become tensors of one element, since a
compiled program may have no other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.call.schema import op_info
from shardwise.comm.ledger import is_counting, record
from shardwise.compile.errors import CaptureError
from shardwise.compile.targets import Begin, Move, MoveMany
from shardwise.torch_internals.inductor import compile_function
from shardwise.torch_internals.recording import empty_fake

__all__ = ["compiled_by_inductor"]

aten = torch.ops.aten


def compiled_by_inductor(graph: fx.Graph) -> Callable[..., Any]:
    """A function of the graph's inputs, with the optimizer's numbers as floats, that returns its outputs."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["val"] for n in inputs if not _is_number(n)]
    like = torch.empty(0, dtype=torch.float64)
    mode = getattr(fakes[0], "fake_mode", None) if fakes else None
    if mode is None:
        raise CaptureError(
            "A program that was captured from meta tensors cannot be compiled.",
            why="A compiler needs to know the device of each tensor.",
            fix="Capture it on the real ranks.",
        )
    numbers = len(inputs) - len(fakes)
    fakes += [empty_fake(mode, (), (), like) for _ in range(numbers)]
    function = compile_function(lambda *values: _evaluate(graph, values), fakes)
    moves = [n.target for n in graph.nodes if isinstance(n.target, Move | MoveMany | Begin)]
    sent = [m.move if isinstance(m, Begin) else m for m in moves]

    def run(*values: Any) -> Any:
        if is_counting():
            for move in sent:
                if move.is_collective:
                    record(move.sent())
        if not numbers:
            return function(*values)
        given = torch.tensor(values[-numbers:], dtype=torch.float64).unbind()
        return function(*values[:-numbers], *given)

    return run


def _is_number(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("number_")


def _evaluate(graph: fx.Graph, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Run the nodes of a graph."""
    values: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(rest)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return tuple(args[0])
        if any(_is_number(n) for n in node.all_input_nodes):
            values[node] = _with_tensors(node.target, args, kwargs)
        else:
            values[node] = node.target(*args, **kwargs)
    raise RuntimeError("the graph has no output. This is a bug in shardwise: please report it.")


def _with_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op with tensors of one element in place of numbers."""
    schema = op_info(func).arguments
    given = {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    scalars = {
        a.name
        for a in schema
        if isinstance(given.get(a.name), Tensor) and "Tensor" not in a.type  # a number, or optional
    }
    if not scalars:
        return func(*args, **kwargs)
    compute = _FORMULAS.get(str(func.overloadpacket).removeprefix("aten.").removesuffix("_"))
    if compute is None:
        raise CaptureError(
            f"The optimizer passes a number that changes from step to step to {func}.",
            why="A compiled program has no formula for this op with a tensor in its place.",
            fix='Use backend="fx".',
        )
    out = compute(**given)
    return given["self"].copy_(out) if op_info(func).writes else out


def _clamp(self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    return aten.clamp.Tensor(self, min, max)  # type: ignore[no-any-return]


_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "add": lambda self, other, alpha=1: self + other * alpha,
    "sub": lambda self, other, alpha=1: self - other * alpha,
    "addcmul": lambda self, tensor1, tensor2, value=1: self + tensor1 * tensor2 * value,
    "addcdiv": lambda self, tensor1, tensor2, value=1: self + tensor1 / tensor2 * value,
    "addmm": lambda self, mat1, mat2, beta=1, alpha=1: self * beta + (mat1 @ mat2) * alpha,
    "lerp": lambda self, end, weight: self + (end - self) * weight,
    "pow": lambda self, exponent: self**exponent,
    "mul": lambda self, other: self * other,
    "div": lambda self, other: self / other,
    "clamp": _clamp,
    "clamp_min": lambda self, min: _clamp(self, min),
}
"""By op, the same with tensors of one element for its numbers."""
