"""Running an op by exchanges: something on the blocks, what is to move, and something on what came."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Offer, seconds_of
from shardwise.call.resolve import tensors_in
from shardwise.comm import on_mesh, run
from shardwise.layout import Factor, Layout, Spec
from shardwise.plan import Plan, plan_redistribute
from shardwise.plan.exchange import Range
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.policy import mind

__all__ = ["block_of", "by_exchange", "fitted", "named", "plain_axes", "plan_to", "with_size"]

_PerBlock = Callable[..., Any]


def named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    given = {a.name: a.default_value for a in func._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | kwargs


def plan_to(t: Any, target: Layout) -> Plan | None:
    """What brings a tensor into a layout, if it is not in it; a plain one is the same everywhere."""
    if not isinstance(t, DTensor) or t._spec.layout is target:
        return None
    return plan_redistribute(t._spec.layout, target, t.dtype.itemsize)


def block_of(t: Any, plan: Plan | None, mesh: Any) -> Tensor:
    """The block of a tensor after a plan, if it has one; a plain tensor is the same on every rank."""
    block: Tensor = t._local_tensor if isinstance(t, DTensor) else t
    return block if plan is None else run(plan, block, mesh)


def plain_axes(layout: Layout, d: int) -> tuple[int, ...] | None:
    """The axes that cut a dim, if they cut all of it plainly and not a factor of it.

    >>> from shardwise.layout import Axes, parse_layout
    >>> layout, _ = parse_layout("[8:dp, 3:tp 4, 5]", Axes((2, 2), ("dp", "tp")))
    >>> [plain_axes(layout, d) for d in range(3)]
    [(0,), None, ()]
    """
    factors = layout.dims[d]
    if not any(f.axes for f in factors):
        return ()
    return factors[0].axes if len(factors) == 1 else None


def with_size(layout: Layout, d: int, size: int, axes: Sequence[int]) -> Layout:
    """A layout with another size along a dim, cut plainly by these axes."""
    return layout.with_dim(d, Factor(size, tuple(axes)))


def fitted(block: Tensor, d: int, has: Range, wants: Range) -> Tensor:
    """A block that covers one range of a dim, cut and filled up with zeros to cover another."""
    if wants[1] <= wants[0] or has[1] <= has[0] or wants[0] >= has[1] or has[0] >= wants[1]:
        shape = list(block.shape)
        shape[d] = max(wants[1] - wants[0], 0)
        return block.new_zeros(shape)
    amounts = [0] * (2 * (block.dim() - d))
    amounts[-2:] = [has[0] - wants[0], wants[1] - has[1]]
    return torch.constant_pad_nd(block, amounts) if any(amounts) else block


def by_exchange(
    func: Any,
    plan: Plan,
    outputs: Sequence[Spec],
    *,
    first: Sequence[Plan | None] = (),
    before: _PerBlock | None = None,
    after: _PerBlock | None = None,
    listed: bool = False,
) -> Offer:
    """An offer to run an op so: `before(coord, *blocks)` makes one block, the plan moves it, `after(coord, block)` ends.

    `first` has what each tensor does before all that, or None where it stays.
    """
    mesh = outputs[0].mesh

    def go(*args: Any, **kwargs: Any) -> Any:
        mind(func, [*first, plan])
        found = tensors_in([*args, *kwargs.values()])
        blocks = [block_of(t, p, mesh) for t, p in itertools.zip_longest(found, first)]
        block: Tensor = blocks[0] if before is None else on_mesh(mesh, before, *blocks)
        block = run(plan, block, mesh)
        result = block if after is None else on_mesh(mesh, after, block)
        if listed:
            return [DTensor(b, spec) for b, spec in zip(result, outputs, strict=True)]
        return DTensor(result, outputs[0])

    return Offer(seconds_of([*first, plan]), go, tuple(outputs))
