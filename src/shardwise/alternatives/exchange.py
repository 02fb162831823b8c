"""Alternatives that run on blocks: move operands, exchange ranges of a dim, compute, and wrap the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.comm import on_mesh
from shardwise.layout import Factor, Layout, Spec
from shardwise.plan import Plan, plan_redistribute
from shardwise.plan.exchange import Range
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import communication, run_plan

__all__ = ["Operand", "block_program", "pad_range", "plan_to", "resize_dim", "split_axes"]

PerBlock = Callable[..., Any]  # of the coord and blocks
BlockSteps = Sequence[Plan | PerBlock | None]


class Operand(NamedTuple):
    """An argument of the op by name (and by position, if it is a list), and what its block goes through first.

    A step is a plan, a function of the coord and the block, or None for nothing.
    """

    name: str
    steps: BlockSteps = ()
    position: int | None = None


def block_program(
    call: OpCall,
    outputs: Spec | Sequence[Spec | None],
    operands: Sequence[Operand],
    compute: PerBlock | None = None,
    then: BlockSteps = (),
) -> Alternative:
    """An alternative that runs on blocks.

    Args:
        call: the call.
        outputs: the spec of the result, or one per result with None for results that the call leaves out. Several results
            are returned as the op returns them, in a tuple or a list.
        operands: the arguments whose blocks it reads; arguments that are None are left out.
        compute: a function of the coord and the operands' blocks; by default the block of the only operand.
        then: what its result goes through afterwards.
    """
    func, mesh = call.func, call.mesh
    present = [o for o in operands if call.named[o.name] is not None]
    plans = tuple(s for o in present for s in o.steps if isinstance(s, Plan))
    plans += tuple(s for s in then if isinstance(s, Plan))
    info = op_info(func)
    as_list = bool(info.returns) and "List" in info.returns[0].type

    def through(block: Any, steps: BlockSteps) -> Any:
        for step in steps:
            if isinstance(step, Plan):
                block = run_plan(func, step, block, mesh)
            elif step is not None:
                block = on_mesh(mesh, step, block)
        return block

    def run(*args: Any, **kwargs: Any) -> Any:
        named = info.bind(args, kwargs)
        with communication(func, plans):
            blocks = []
            for o in present:
                t = named[o.name] if o.position is None else named[o.name][o.position]
                blocks.append(through(t._local_tensor if isinstance(t, DTensor) else t, o.steps))
            result = blocks[0] if compute is None else on_mesh(mesh, compute, *blocks)
            result = through(result, then)
        if isinstance(outputs, Spec):
            return DTensor(result, outputs)
        computed = iter(result)
        wrapped = [None if spec is None else DTensor(next(computed), spec) for spec in outputs]
        return wrapped if as_list else tuple(wrapped)

    listed = (outputs,) if isinstance(outputs, Spec) else outputs
    return Alternative(run, plans, tuple(spec for spec in listed if spec is not None))


def plan_to(t: Any, target: Layout) -> Plan | None:
    """What redistributes an operand to a layout, if it has another one; a plain tensor is replicated."""
    if not isinstance(t, DTensor) or t._spec.layout is target:
        return None
    return plan_redistribute(t._spec.layout, target, t.dtype.itemsize)


def split_axes(layout: Layout, d: int) -> tuple[int, ...] | None:
    """The axes that split a dim; None if they split only a factor of it.

    >>> from shardwise.layout import Axes, parse_layout
    >>> layout, _ = parse_layout("[8:dp, 3:tp 4, 5]", Axes((2, 2), ("dp", "tp")))
    >>> [split_axes(layout, d) for d in range(3)]
    [(0,), None, ()]
    """
    factors = layout.dims[d]
    if not any(f.axes for f in factors):
        return ()
    return factors[0].axes if len(factors) == 1 else None


def resize_dim(layout: Layout, d: int, size: int, axes: Sequence[int]) -> Layout:
    """A layout with another size of a dim, which is split by these axes."""
    return layout.with_dim(d, Factor(size, tuple(axes)))


def pad_range(block: Tensor, d: int, has: Range, wants: Range) -> Tensor:
    """A block that covers one range of a dim, sliced and padded with zeros to cover another."""
    if wants[1] <= wants[0] or has[1] <= has[0] or wants[0] >= has[1] or has[0] >= wants[1]:
        shape = list(block.shape)
        shape[d] = max(wants[1] - wants[0], 0)
        return block.new_zeros(shape)
    amounts = [0] * (2 * (block.dim() - d))
    amounts[-2:] = [has[0] - wants[0], wants[1] - has[1]]
    return torch.constant_pad_nd(block, amounts) if any(amounts) else block
