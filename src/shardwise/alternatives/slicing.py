"""Slices, single positions and splits of a split dim: each rank gets its block of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, SplitDim, block_program, plan_to, split_dim
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout, Spec, block_shape
from shardwise.layout.sizes import least, most, same_sizes
from shardwise.plan import Move, plan_exchanges
from shardwise.plan.exchange import Range
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


class _Slice(NamedTuple):
    """A slice of a split dim: its start, step and length, and the range of the dim in each rank's block."""

    split: SplitDim
    start: int
    step: int
    length: int
    blocks: tuple[Range, ...]

    def part(self, r: Range) -> Range:
        """The positions of the slice that are in a range of the dim."""
        first, last = (
            least(most((end - self.start + self.step - 1) // self.step, 0), self.length) for end in r
        )
        return first, last

    @property
    def parts(self) -> list[Range]:
        """The positions of the slice that are in each rank's block of the dim."""
        return [self.part(r) for r in self.blocks]

    def to_slice(self) -> Move:
        """The exchange from the parts that the blocks of the dim contain to even blocks of the slice."""
        return self.split.move(self.parts, self.split.ranges(self.length))

    def to_dim(self) -> Move:
        """The reverse exchange."""
        return self.split.move(self.split.ranges(self.length), self.parts)

    def locate(self, coord: Coord) -> tuple[slice, ...]:
        """The index of the slice's elements in a rank's block of the dim."""
        block = self.blocks[self.split.position(coord)]
        first, last = self.part(block)
        low = self.start + first * self.step - block[0]
        high = low + (last - first - 1) * self.step + 1
        here = slice(low, high, self.step) if last > first else slice(0, 0)
        return (*(slice(None),) * self.split.dim, here)


def _slice_of(call: OpCall, layout: Layout, full: Sequence[int], part: Sequence[int]) -> _Slice | None:
    """The slice of a call, given the layout and both shapes; None if axes split only a factor of the dim."""
    d = call.named["dim"] % layout.ndim
    split, step = split_dim(layout, d), call.named["step"]
    if split is None:
        return None
    start = _start(call.named["start"], full[d])
    return _Slice(split, start, step, part[d], split.ranges(full[d]))


def _start(start: int | None, size: int) -> int:
    """The first position of a slice of a dim, which may be given from its end or beyond it."""
    start = 0 if start is None else start
    return least(most(start + size, 0) if start < 0 else start, size)  # type: ignore[no-any-return]


class _Packed(NamedTuple):
    """A dim of which no axis splits the outermost factor: a number of parts, each of which is split alike.

    Packed projections have such a dim: `[2 n:tp]` are two matrices of n rows. Ranges of whole parts are local.
    """

    dim: int
    parts: int
    inner: int
    layout: Layout

    def take(self, start: int, length: int) -> tuple[int, int, Layout] | None:
        """The first part and the number of parts of a range, and the layout of the range; None if it cuts a part."""
        if start % self.inner or length % self.inner or not length:
            return None
        count, rest = length // self.inner, self.layout.dims[self.dim][1:]
        lead = [Factor(count)] if count > 1 else []
        return start // self.inner, count, self.layout.with_dim(self.dim, *lead, *rest)

    def size(self, block: Tensor) -> int:
        """The size of one part in a rank's block."""
        return block.shape[self.dim] // self.parts


def _packed(layout: Layout, d: int) -> _Packed | None:
    first, *rest = layout.dims[d]
    if not rest or first.axes or first.size < 2 or not layout.shape[d]:
        return None
    return _Packed(d, first.size, layout.shape[d] // first.size, layout)


def _packed_slice(call: OpCall, out: Spec, packed: _Packed | None) -> Alternative | None:
    """A slice of whole parts of a packed dim."""
    if packed is None or call.named["step"] != 1:
        return None
    d = packed.dim
    start = _start(call.named["start"], packed.layout.shape[d])
    taken = packed.take(start, out.shape[d])
    if taken is None:
        return None
    first, count, layout = taken

    def cut(coord: Coord, block: Tensor) -> Tensor:
        return block.narrow(d, first * packed.size(block), count * packed.size(block)).clone()

    return block_program(call, out.with_layout(layout), [Operand("self")], cut)


def _packed_split(call: OpCall, resolution: Resolution, packed: _Packed | None) -> Alternative | None:
    """A split into whole parts of a packed dim."""
    if packed is None:
        return None
    d, outs, start, taken = packed.dim, resolution.outputs, 0, []
    for out in outs:
        taken.append(packed.take(start, out.shape[d]))
        start += out.shape[d]
    kept = [t for t in taken if t is not None]
    if len(kept) < len(taken):
        return None

    def cut(coord: Coord, block: Tensor) -> list[Tensor]:
        sizes = [count * packed.size(block) for _, count, _ in kept]
        return [part.clone() for part in block.split(sizes, d)]

    specs = [out.with_layout(layout) for out, (_, _, layout) in zip(outs, kept, strict=True)]
    return block_program(call, specs, [Operand("self")], cut)


def _slice(call: OpCall, resolution: Resolution) -> Alternative | None:
    x: DTensor = call.named["self"]
    layout, out = x._spec.layout, resolution.outputs[0]
    if local := _packed_slice(call, out, _packed(layout, call.named["dim"] % x.dim())):
        return local
    piece = _slice_of(call, layout, x.shape, out.shape)
    if piece is None:
        return None
    exchange = plan_exchanges(layout, [piece.to_slice()], x.dtype.itemsize)
    spec = out.with_layout(piece.split.resize(layout, piece.length))
    return block_program(
        call, spec, [Operand("self")], lambda coord, block: block[piece.locate(coord)], exchange
    )


def _slice_backward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank writes the part of the gradient that belongs to its block into zeros."""
    grad: DTensor = call.named["grad_output"]
    layout, out = grad._spec.layout, resolution.outputs[0]
    if same_sizes(grad.shape, out.shape):  # of everything, as in x[:, None]
        return block_program(
            call, out.with_layout(layout), [Operand("grad_output")], lambda coord, block: block.clone()
        )
    piece = _slice_of(call, layout, out.shape, grad.shape)
    if piece is None:
        return None
    target = piece.split.resize(layout, out.shape[piece.split.dim])

    def write(coord: Coord, block: Tensor) -> Tensor:
        full = block.new_zeros(block_shape(target, coord))
        full[piece.locate(coord)] = block
        return full

    exchange = plan_exchanges(layout, [piece.to_dim()], grad.dtype.itemsize)
    return block_program(call, out.with_layout(target), [Operand("grad_output")], exchange, write)


def _slice_scatter(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank writes the part of the source that belongs to its block into a copy of the block."""
    x, src = call.named["self"], call.named["src"]
    if not isinstance(x, DTensor) or not isinstance(src, DTensor) or x.dtype != src.dtype:
        return None
    layout = x._spec.layout
    piece = _slice_of(call, layout, x.shape, src.shape)
    if piece is None or any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    source = piece.split.resize(layout, piece.length)

    def write(coord: Coord, full: Tensor, block: Tensor) -> Tensor:
        full = full.clone()
        full[piece.locate(coord)] = block
        return full

    exchange = plan_exchanges(source, [piece.to_dim()], src.dtype.itemsize)
    operands = [Operand("self"), Operand("src", [plan_to(src, source), exchange])]
    return block_program(call, resolution.outputs[0].with_layout(layout), operands, write)


def _select(call: OpCall, resolution: Resolution) -> Alternative | None:
    """All ranks want one position of a split dim, and only its owner sends."""
    x: DTensor = call.named["self"]
    layout, d = x._spec.layout, call.named["dim"] % x.dim()
    split = split_dim(layout, d)
    if split is None:
        return None
    i, owned = call.named["index"] % x.shape[d], split.ranges(x.shape[d])
    exchange = plan_exchanges(layout, [split.move(owned, [(i, i + 1)] * len(owned))], x.dtype.itemsize)
    target = layout.with_dims([dim for e, dim in enumerate(layout.dims) if e != d])
    return block_program(
        call,
        resolution.outputs[0].with_layout(target),
        [Operand("self")],
        exchange,
        lambda coord, block: block.squeeze(d),
    )


def _split(call: OpCall, resolution: Resolution) -> Alternative | None:
    """All parts of a split dim in one exchange; each part is split by the same axes."""
    x: DTensor = call.named["self"]
    layout, d = x._spec.layout, call.named["dim"] % x.dim()
    split = split_dim(layout, d)
    if split is None:
        return _packed_split(call, resolution, _packed(layout, d))
    sizes = [out.shape[d] for out in resolution.outputs]
    owned = tuple((r,) for r in split.ranges(x.shape[d]))
    wanted = split.part_ranges(sizes)

    def cut(coord: Coord, block: Tensor) -> list[Tensor]:
        return list(block.split([high - low for low, high in wanted[split.position(coord)]], d))

    pairs = zip(resolution.outputs, sizes, strict=True)
    specs = [out.with_layout(split.resize(layout, size)) for out, size in pairs]
    exchange = plan_exchanges(layout, [Move(d, split.axes, owned, wanted)], x.dtype.itemsize)
    return block_program(call, specs, [Operand("self")], exchange, cut)


ALTERNATIVES: dict[Any, Propose] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
