"""Alternatives that run on blocks: move the operands, exchange ranges of a dim, compute, wrap the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.comm import Coord, on_mesh
from shardwise.layout import Axes, Factor, Layout, Spec
from shardwise.layout.sizes import as_size, least, most
from shardwise.plan import Move, Plan, plan_redistribute
from shardwise.plan.exchange import Range, Ranges, chunked, place_of
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, run_plan

__all__ = ["Operand", "SplitDim", "block_program", "clamp_range", "pad_range", "plan_to", "split_dim"]

BlockStep = Plan | tuple[Plan | None, ...] | Callable[..., Any] | None
"""What blocks go through: a plan; a tuple of plans, one per block, or all for the same block if there is only
one; a function of the coord and the blocks, which returns a block or several; or None for nothing.
"""


class Operand(NamedTuple):
    """An argument of the op by name, and by position if it is a list; with its block's first steps."""

    name: str
    steps: Sequence[BlockStep] = ()
    position: int | None = None


def block_program(
    call: OpCall, outputs: Spec | Sequence[Spec | None], operands: Sequence[Operand], *steps: BlockStep
) -> Alternative:
    """An alternative that runs on blocks.

    Args:
        call: the call.
        outputs: the spec of the result, or one per result with None for results that the call leaves out.
            Several results are returned as the op returns them, in a tuple or a list.
        operands: the arguments whose blocks it reads; arguments that are None are left out.
        *steps: what the blocks of all operands go through together; the last blocks are the results.
    """
    func, mesh, info = call.func, call.mesh, op_info(call.func)
    present = [o for o in operands if call.named[o.name] is not None]
    every = [step for o in present for step in o.steps] + list(steps)
    planned = [p for step in every for p in (step if isinstance(step, tuple) else (step,))]
    plans = tuple(p for p in planned if isinstance(p, Plan))
    as_list = bool(info.returns) and "List" in info.returns[0].type

    def run_steps(blocks: list[Tensor], steps: Sequence[BlockStep]) -> list[Tensor]:
        for step in steps:
            if callable(step):
                result = on_mesh(mesh, step, *blocks)
                blocks = list(result) if isinstance(result, list | tuple) else [result]
            elif step is not None:
                each = step if isinstance(step, tuple) else (step,)
                blocks = blocks * len(each) if len(blocks) == 1 else blocks
                pairs = zip(each, blocks, strict=True)
                blocks = [b if plan is None else run_plan(func, plan, b, mesh) for plan, b in pairs]
        return blocks

    def run(*args: Any, **kwargs: Any) -> Any:
        named = info.bind(args, kwargs)
        blocks: list[Tensor] = []
        with communication(func, plans):
            for o in present:
                t = named[o.name] if o.position is None else named[o.name][o.position]
                blocks += run_steps([t._local_tensor if isinstance(t, DTensor) else t], o.steps)
            blocks = run_steps(blocks, steps)
        if isinstance(outputs, Spec):
            return DTensor(blocks[0], outputs)
        rest = iter(blocks)
        results = [None if spec is None else DTensor(next(rest), spec) for spec in outputs]
        return results if as_list else tuple(results)

    listed = (outputs,) if isinstance(outputs, Spec) else outputs
    return Alternative(run, plans, tuple(spec for spec in listed if spec is not None))


def plan_to(t: Any, target: Layout) -> Plan | None:
    """The plan that moves an operand to a layout; None if it has that layout, or is a plain tensor."""
    if not isinstance(t, DTensor) or t._spec.layout is target:
        return None
    return plan_redistribute(t._spec.layout, target, t.dtype.itemsize)


class SplitDim(NamedTuple):
    """A dim of a tensor and the mesh axes that split it, if any.

    >>> rows = SplitDim(0, (1, 0), Axes((2, 2)))
    >>> rows.ranges(5), rows.position((0, 1))
    (((0, 2), (2, 3), (3, 4), (4, 5)), 2)
    >>> SplitDim(0, (0,), Axes((2, 2))).part_ranges([2, 3])
    (((0, 1), (2, 4)), ((1, 2), (4, 5)))
    """

    dim: int
    axes: tuple[int, ...]
    on: Axes

    def ranges(self, size: int) -> tuple[Range, ...]:
        """The range of each rank if the dim has this size, by its position on the axes."""
        return chunked(as_size(size), self.axes, self.on)

    def part_ranges(self, sizes: Sequence[int]) -> tuple[Ranges, ...]:
        """The ranges of each rank if the dim consists of parts that are each split by the axes."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [[(s + a, s + b) for a, b in self.ranges(n)] for s, n in zip(starts, sizes, strict=True)]
        return tuple(zip(*parts, strict=True))

    def position(self, coord: Coord) -> int:
        """The position of a coord on the axes, in row-major order."""
        return place_of(coord, self.axes, self.on)

    def move(self, owned: Sequence[Range], wanted: Sequence[Range]) -> Move:
        """An exchange along the dim, with one range per rank."""
        return Move(self.dim, self.axes, tuple((r,) for r in owned), tuple((r,) for r in wanted))

    def resize(self, layout: Layout, size: int) -> Layout:
        """A layout in which the dim has another size, split by the same axes."""
        return layout.with_dim(self.dim, Factor(size, self.axes))


def split_dim(layout: Layout, d: int) -> SplitDim | None:
    """How a dim is split; None if axes split only a factor of it.

    >>> from shardwise.layout import parse_layout
    >>> layout, _ = parse_layout("[8:dp, 3:tp 4, 5]", Axes((2, 2), ("dp", "tp")))
    >>> [found and found.axes for found in (split_dim(layout, d) for d in range(3))]
    [(0,), None, ()]
    """
    factors = layout.dims[d]
    if not any(f.axes for f in factors):
        return SplitDim(d, (), layout.axes)
    return SplitDim(d, factors[0].axes, layout.axes) if len(factors) == 1 else None


def clamp_range(r: Range, low: int, high: int) -> Range:
    """The part of a range inside another one; empty at its nearest end if there is none.

    >>> clamp_range((-2, 3), 0, 8), clamp_range((9, 12), 0, 8)
    ((0, 3), (8, 8))
    """
    first = least(most(r[0], low), most(high, low))
    return first, most(least(r[1], high), first)


def pad_range(block: Tensor, d: int, has: Range, wants: Range, value: float = 0) -> Tensor:
    """A block that covers one range of a dim, sliced and padded with a value to cover another."""
    if wants[1] <= wants[0] or has[1] <= has[0] or wants[0] >= has[1] or has[0] >= wants[1]:
        shape = list(block.shape)
        shape[d] = max(wants[1] - wants[0], 0)
        return block.new_full(shape, value)
    amounts = [0] * (2 * (block.dim() - d))
    amounts[-2:] = [has[0] - wants[0], wants[1] - has[1]]
    return torch.constant_pad_nd(block, amounts, value) if any(amounts) else block
