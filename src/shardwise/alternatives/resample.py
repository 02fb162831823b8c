"""Nearest-neighbour resampling, and padding by reflection or replication, along split dims.

Each position of the result is a copy of one position of the input. A rank gets the range of the input that
its block of the result copies; for the gradient, the range of the result that contains copies of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, SplitDim, block_program, split_dim
from shardwise.alternatives.halo import resize_dims
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


class _Copies(NamedTuple):
    """The input position that each result position of a dim copies, and the ranges of both on each rank."""

    split: SplitDim
    source: tuple[int, ...]
    inputs: tuple[Range, ...]
    results: tuple[Range, ...]

    def sources(self, result: Range) -> Range:
        """The range of the input that a range of the result copies from."""
        some = self.source[result[0] : result[1]]
        return (min(some), max(some) + 1) if some else (0, 0)

    def copies(self, own: Range) -> Range:
        """The range of the result that contains all copies of a range of the input."""
        some = [o for o, i in enumerate(self.source) if own[0] <= i < own[1]]
        return (some[0], some[-1] + 1) if some else (0, 0)

    def forward(self) -> Move:
        return self.split.move(self.inputs, [self.sources(r) for r in self.results])

    def backward(self) -> Move:
        return self.split.move(self.results, [self.copies(r) for r in self.inputs])

    def copy(self, coord: Coord, block: Tensor) -> Tensor:
        """A rank's block of the result, from the range that it copies from."""
        result = self.results[self.split.position(coord)]
        start = self.sources(result)[0]
        index = [i - start for i in self.source[result[0] : result[1]]]
        return block.index_select(self.split.dim, torch.tensor(index, dtype=torch.int64, device=block.device))

    def accumulate(self, coord: Coord, block: Tensor) -> Tensor:
        """The gradient of a rank's block of the input, from the gradient of the range that copies from it."""
        low, high = own = self.inputs[self.split.position(coord)]
        first, last = self.copies(own)
        pairs = [
            (o - first, self.source[o] - low) for o in range(first, last) if low <= self.source[o] < high
        ]
        shape = list(block.shape)
        shape[self.split.dim] = high - low
        out = block.new_zeros(shape)
        if pairs:
            rows, index = torch.tensor(pairs, dtype=torch.int64, device=block.device).unbind(1)
            out.index_add_(self.split.dim, index, block.index_select(self.split.dim, rows))
        return out


def _source(family: str, n: int, m: int, option: Any, dtype: torch.dtype) -> tuple[int, ...]:
    """The input position that each result position copies: the op's own result for position numbers."""
    line = torch.arange(n, dtype=dtype).view(1, 1, n)
    op = getattr(aten, f"{family}1d").default
    copied = op(line, [m], option) if "upsample" in family else op(line, option)
    return tuple(int(i) for i in copied.flatten().tolist())


def _options(family: str, nd: int, named: dict[str, Any]) -> list[Any]:
    """The option of the op along each dim: its scale, or how much it pads."""
    if "upsample" in family:
        names = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}[nd]
        return [named[name] for name in names]
    pad = named["padding"]
    return [pad[2 * (nd - 1 - i) : 2 * (nd - i)] for i in range(nd)]


def _copies(
    family: str, nd: int, call: OpCall, t: DTensor, inputs: Sequence[int], results: Sequence[int]
) -> list[_Copies] | None:
    """The copies along the last dims of the call's tensor.

    None if none is split, or only a factor of one, or if the dtype cannot count the positions exactly.
    """
    layout = t._spec.layout
    if t.dtype not in (torch.float32, torch.float64) or 0 in inputs or 0 in results or max(inputs) > 2**24:
        return None
    every = []
    for d, option in enumerate(_options(family, nd, call.named), layout.ndim - nd):
        split = split_dim(layout, d)
        if split is None:
            return None
        source = _source(family, inputs[d], results[d], option, t.dtype)
        every.append(_Copies(split, source, split.ranges(inputs[d]), split.ranges(results[d])))
    return every if any(c.split.axes for c in every) else None


def _forward(family: str, nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    x: DTensor = call.named["self"]
    layout, out = x._spec.layout, resolution.outputs[0]
    every = _copies(family, nd, call, x, x.shape, out.shape)
    if every is None:
        return None
    exchange = plan_exchanges(layout, [c.forward() for c in every], x.dtype.itemsize)
    spec = out.with_layout(resize_dims(layout, out.shape[-nd:]))
    return block_program(call, spec, [Operand("self")], exchange, *(c.copy for c in every))


def _backward(family: str, nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    grad = call.named["grad_output"]
    if not isinstance(grad, DTensor):
        return None
    layout, out = grad._spec.layout, resolution.outputs[0]
    every = _copies(family, nd, call, grad, out.shape, grad.shape)
    if every is None or any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    exchange = plan_exchanges(layout, [c.backward() for c in every], grad.dtype.itemsize)
    spec = out.with_layout(resize_dims(layout, out.shape[-nd:]))
    return block_program(call, spec, [Operand("grad_output")], exchange, *(c.accumulate for c in every))


_FAMILIES = ("upsample_nearest", "_upsample_nearest_exact", "reflection_pad", "replication_pad")

ALTERNATIVES: dict[Any, Propose] = {
    getattr(aten, f"{family}{nd}d{suffix}").default: partial(propose, family, nd)
    for family in _FAMILIES
    for nd in (1, 2, 3)
    for suffix, propose in (("", _forward), ("_backward", _backward))
}
