"""Programs on the blocks of one rank that replace an op: as its rule states them, compiled to functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.block_kernels import BLOCK_KERNELS
from shardwise.comm import Coord, coord_of, members_of
from shardwise.layout import block_offset, block_shape
from shardwise.plan import Choice
from shardwise.rules import Call, Listed, Local, Out, Place, Rule, Slot
from shardwise.torch_internals.dispatcher import python_binding

__all__ = ["LocalProgram", "local_programs"]

LocalProgram = Callable[[Sequence[Tensor]], Any]


def local_programs(
    call: Call, rule: Rule | Listed | None, choice: Choice, mesh: Any, simulated: bool
) -> dict[int | None, LocalProgram | None] | None:
    """The program of each rank that this process runs, None where the op itself runs on its blocks.

    A real process has one entry, under None. The result is None if no rank has a program.
    """
    if isinstance(rule, Listed) or (rule is not None and rule.local is None):
        return None
    coords: dict[int | None, Coord] = {}
    if simulated:
        coords.update(list(members_of(mesh).items()))
    elif (coord := coord_of(mesh)) is not None:
        coords[None] = coord
    programs = {rank: _program(call, rule, choice, coord) for rank, coord in coords.items()}
    if all(p is None for p in programs.values()):
        return None
    return {rank: None if p is None else _compile(p) for rank, p in programs.items()}


def _program(call: Call, rule: Rule | None, choice: Choice, coord: Coord) -> Local | None:
    shapes = tuple(block_shape(o, coord) for o in choice.outputs)
    if rule is None or rule.local is None:
        viewed = Local((("aten.view.default", (Slot(0), list(shapes[0])), {}),))
        is_copy = call.op.split(".")[1].endswith("_copy")
        contiguous = {"memory_format": torch.contiguous_format}
        return Local((*viewed.steps, ("aten.clone.default", (Out(0),), contiguous))) if is_copy else viewed
    split = frozenset(
        x
        for letters, layout in zip(rule.inputs, choice.inputs, strict=True)
        for x, dim in zip(letters, layout.dims, strict=True)
        if x is not None and any(f.axes for f in dim)
    )
    blocks = tuple(block_shape(i, coord) for i in choice.inputs)
    offsets = tuple(block_offset(i, coord) for i in choice.inputs)
    return rule.local(call, Place(blocks, shapes, offsets, split))


def _compile(program: Local) -> LocalProgram:
    steps = [(_function(name), args, kwargs) for name, args, kwargs in program.steps]
    if not program.results and all(_is_chained(i, step) for i, step in enumerate(program.steps)):
        chain = [(op, args[1:], kwargs) for op, args, kwargs in steps]

        def run_chain(blocks: Sequence[Tensor]) -> Any:
            x = blocks[0]
            for op, rest, named in chain:
                x = op(x, *rest, **named)
            return x

        return run_chain

    def value(arg: Any, blocks: Sequence[Tensor], results: list[Any]) -> Any:
        if isinstance(arg, Slot):
            return blocks[arg.number]
        if isinstance(arg, Out):
            return results[arg.step] if arg.number is None else results[arg.step][arg.number]
        return [value(a, blocks, results) for a in arg] if isinstance(arg, list) else arg

    def run(blocks: Sequence[Tensor]) -> Any:
        results: list[Any] = []
        for op, args, kwargs in steps:
            named = {k: value(a, blocks, results) for k, a in kwargs.items()}
            results.append(op(*(value(a, blocks, results) for a in args), **named))
        return tuple(value(r, blocks, results) for r in program.results) if program.results else results[-1]

    return run


def _is_chained(number: int, step: tuple[str, tuple[Any, ...], Mapping[str, Any]]) -> bool:
    """Whether a step's only tensor is the result of the previous step, or the first block for the first step."""
    _, args, kwargs = step
    previous: Any = Out(number - 1) if number else Slot(0)
    return bool(args) and args[0] == previous and not _reads([*args[1:], *kwargs.values()])


def _reads(value: Any) -> bool:
    """Whether an argument of a step is or contains a block or an earlier result."""
    return any(_reads(v) for v in value) if isinstance(value, list) else isinstance(value, Slot | Out)


def _function(name: str) -> Callable[..., Any]:
    if (kernel := BLOCK_KERNELS.get(name)) is not None:
        return kernel
    _, packet, overload = name.split(".")
    return python_binding(getattr(getattr(torch.ops.aten, packet), overload))
