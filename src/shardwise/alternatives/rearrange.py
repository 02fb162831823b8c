"""Ops that move positions of a split dim: each rank gets the ranges that make up its block of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, SplitDim, block_program, clamp_range, plan_to, split_dim
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord, block_of
from shardwise.layout import Factor, Layout, Spec
from shardwise.layout.sizes import least, most, same_sizes
from shardwise.plan import Move, Plan, plan_exchanges
from shardwise.plan.exchange import Range, Ranges
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.symbolic_specs import refreshed

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten
_Target = Callable[[Range], Ranges]  # where a range of a dim is in the result


def _plan(x: DTensor, targets: dict[int, _Target]) -> Plan | None:
    """The plan that moves ranges of some dims to their targets; None if axes split only a factor of a dim."""
    layout, moves = x._spec.layout, []
    for d, target in targets.items():
        split = split_dim(layout, d)
        if split is None:
            return None
        ranges = split.ranges(x.shape[d])
        moves.append(Move(d, split.axes, tuple(map(target, ranges)), tuple((r,) for r in ranges)))
    return plan_exchanges(layout, moves, x.dtype.itemsize)


def _roll(call: OpCall, resolution: Resolution) -> Alternative | None:
    """A rank's range becomes another one, or two where it wraps around the end."""
    x: DTensor = call.named["self"]
    shifts: dict[int, int] = {}
    for d, shift in zip(call.named["dims"], call.named["shifts"], strict=False):
        shifts[d % x.dim()] = shifts.get(d % x.dim(), 0) + shift

    def target(n: int, shift: int) -> _Target:
        def roll(r: Range) -> Ranges:
            low, length = (r[0] + shift) % most(n, 1), r[1] - r[0]
            first = least(length, n - low)
            wraps = type(first) is not int or length > first
            return ((low, low + first), (0, length - first)) if wraps else ((low, low + length),)

        return roll

    # without dims the flattened tensor is rolled
    plan = _plan(x, {d: target(x.shape[d], shift) for d, shift in shifts.items()}) if shifts else None
    if plan is None:
        return None
    spec = resolution.outputs[0].with_layout(x._spec.layout)
    if any(shift % most(x.shape[d], 1) for d, shift in shifts.items()):
        return block_program(call, spec, [Operand("self")], plan)
    return block_program(call, spec, [Operand("self")], lambda coord, block: block.clone(), plan)


def _flip(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank flips its block, which is then the range at the same distance from the other end."""
    x: DTensor = call.named["self"]
    dims = [d % x.dim() for d in call.named["dims"]]

    def target(n: int) -> _Target:
        return lambda r: ((n - r[1], n - r[0]),)

    plan = _plan(x, {d: target(x.shape[d]) for d in dims})
    if plan is None:
        return None
    spec = resolution.outputs[0].with_layout(x._spec.layout)
    return block_program(call, spec, [Operand("self")], lambda coord, block: block.flip(dims), plan)


class _Padding(NamedTuple):
    """The padding of a dim of `size` positions to `padded`, `left` of them in front; negative ones crop."""

    split: SplitDim
    left: int
    size: int
    padded: int

    def kept(self, r: Range) -> Range:
        """The part of a range of the result that is not padding."""
        return clamp_range(r, max(self.left, 0), least(self.left + self.size, self.padded))

    def owned(self, r: Range) -> Range:
        """The range of the result that a range of the dim becomes."""
        return self.kept((r[0] + self.left, r[1] + self.left))

    def move(self) -> Move:
        owned = [self.owned(r) for r in self.split.ranges(self.size)]
        return self.split.move(owned, [self.kept(r) for r in self.split.ranges(self.padded)])

    def crop(self, coord: Coord, block: Tensor) -> Tensor:
        """The part of a block that is in the result."""
        block_range = self.split.ranges(self.size)[self.split.position(coord)]
        low, high = self.owned(block_range)
        return block.narrow(self.split.dim, low - self.left - block_range[0] if high > low else 0, high - low)

    def amounts(self, coord: Coord) -> list[int]:
        """The padding on both sides of what a rank has received."""
        start, end = self.split.ranges(self.padded)[self.split.position(coord)]
        low, high = self.kept((start, end))
        return [low - start, end - high] if high > low else [end - start, 0]


def _pad(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Ranges shift by the padding, and the ranks at the ends pad what they receive."""
    x: DTensor = call.named["self"]
    pad, value = call.named["pad"], call.named["value"]
    source, out = x._spec.layout, resolution.outputs[0]
    if source.partial and value != 0:
        return None
    target, dims = source, []
    for i in range(0, len(pad), 2):
        d = x.dim() - 1 - i // 2
        split = split_dim(source, d)
        if split is None:
            return None
        dims.append(_Padding(split, pad[i], x.shape[d], out.shape[d]))
        target = split.resize(target, out.shape[d])

    def crop(coord: Coord, block: Tensor) -> Tensor:
        for p in dims:
            block = p.crop(coord, block)
        return block

    def fill(coord: Coord, block: Tensor) -> Tensor:
        amounts = [n for p in dims for n in p.amounts(coord)]
        return aten.constant_pad_nd.default(block, amounts, value)  # type: ignore[no-any-return]

    exchange = plan_exchanges(source, [p.move() for p in dims], x.dtype.itemsize)
    return block_program(call, out.with_layout(target), [Operand("self")], crop, exchange, fill)


def _cat(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank concatenates its blocks; they are ranges of the result, which then move to their owners."""
    tensors, out = call.named["tensors"], resolution.outputs[0]
    d = call.named["dim"] % len(out.shape)
    # torch ignores empty tensors of one dim
    used = [i for i, t in enumerate(tensors) if t.dim() == len(out.shape)]
    lead = max((i for i in used if _split_of(tensors[i], d)), key=lambda i: tensors[i].numel(), default=None)
    split = None if lead is None else _split_of(tensors[lead], d)
    if split is None or any(t.dtype != out.dtype for t in tensors):
        return None
    layout: Layout = tensors[lead]._spec.layout
    if len(used) > 1 and all(_are_split_alike(tensors[i], tensors[lead]) for i in used):
        return _pack(call, out, d, used, layout)
    is_plain = [not isinstance(t, DTensor) for t in tensors]
    if any(op not in ("sum", "avg") for _, op in layout.partial) or (layout.partial and any(is_plain)):
        return None
    sizes = [tensors[i].shape[d] for i in used]
    layouts = {i: split.resize(layout, size) for i, size in zip(used, sizes, strict=True)}
    wanted = tuple((r,) for r in split.ranges(out.shape[d]))

    def concatenate(coord: Coord, *blocks: Tensor) -> Tensor:
        pairs = zip(used, blocks, strict=True)
        return torch.cat([block_of(b, layouts[i], coord) if is_plain[i] else b for i, b in pairs], d)

    target = split.resize(layout, out.shape[d])
    exchange = plan_exchanges(
        target, [Move(d, split.axes, split.part_ranges(sizes), wanted)], out.dtype.itemsize
    )
    operands = [Operand("tensors", [plan_to(tensors[i], layouts[i])], position=i) for i in used]
    return block_program(call, out.with_layout(target), operands, concatenate, exchange)


def _pack(call: OpCall, out: Spec, d: int, used: list[int], layout: Layout) -> Alternative | None:
    """Tensors that are split alike, as the parts of a packed dim: `[n:tp]` and `[n:tp]` are `[2 n:tp]`, and nothing moves.

    It is the gradient of a split of a packed projection into its parts.
    """
    if any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    target = layout.with_dim(d, Factor(len(used)), *layout.dims[d])
    operands = [Operand("tensors", position=i) for i in used]
    return block_program(
        call, out.with_layout(target), operands, lambda coord, *blocks: torch.cat(list(blocks), d)
    )


def _are_split_alike(t: Tensor, other: DTensor) -> bool:
    """Whether a tensor has the spec of another; whether symbolic sizes are equal is a question."""
    if not isinstance(t, DTensor) or not t._spec.is_symbolic:
        return getattr(t, "_spec", None) is other._spec
    if t._spec.placements != other._spec.placements or not same_sizes(t.shape, other.shape):
        return False
    return refreshed(t._spec) is refreshed(other._spec)


def _split_of(t: Tensor, d: int) -> SplitDim | None:
    """How a dim is split; None also if it is not."""
    split = split_dim(t._spec.layout, d) if isinstance(t, DTensor) else None
    return split if split is not None and split.axes else None


ALTERNATIVES: dict[Any, Propose] = {
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
}
