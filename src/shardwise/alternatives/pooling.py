"""Pooling over split positions by halo exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, block_program, plan_to
from shardwise.alternatives.halo import Halo, plan_to_positions, plan_to_windows, resize_dims, split_halos
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Layout, block_shape
from shardwise.plan.exchange import Range
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


class _Pool(NamedTuple):
    """A pool over the last dims of a tensor, with the halos of those that are split."""

    windows: tuple[Window, ...]
    sizes: tuple[int, ...]
    halos: tuple[Halo | None, ...]
    ceil_mode: bool

    @property
    def split(self) -> list[Halo]:
        return [h for h in self.halos if h is not None]

    @property
    def block_arguments(self) -> tuple[list[int], list[int], list[int]]:
        """Kernel size, stride and padding for blocks with their halos: split dims are padded already."""
        pairs = list(zip(self.windows, self.halos, strict=True))
        padding = [w.padding if h is None else 0 for w, h in pairs]
        return [w.size for w, _ in pairs], [w.stride for w, _ in pairs], padding


def _pool(nd: int, call: OpCall, layout: Layout, inputs: Any, results: Any) -> _Pool | None:
    """The pool of a call whose positions have this layout; None if there are no halos to exchange."""

    def each(value: Any, default: list[int]) -> list[int]:
        listed = list(value) if isinstance(value, list | tuple) else [value]
        return (listed * nd if len(listed) == 1 else listed) or default

    named = call.named
    kernel = each(named["kernel_size"], [])
    numbers = kernel, each(named["stride"], kernel), each(named["padding"], [])
    windows = tuple(Window(*w) for w in zip(*numbers, each(named.get("dilation", 1), []), strict=True))
    halos = split_halos(layout, windows, inputs[-nd:], results[-nd:])
    if halos is None or 0 in inputs or 0 in results:
        return None
    split = {h.dim - (layout.ndim - nd): h for h in halos}
    return _Pool(windows, tuple(inputs[-nd:]), tuple(split.get(i) for i in range(nd)), named["ceil_mode"])


class _Divisors(NamedTuple):
    """The divisors of the windows' sums: how many positions count along each dim, or one number for all."""

    counts: tuple[tuple[int, ...], ...]
    common: int | None

    def divide(self, block: Tensor, ranges: Sequence[Range | None]) -> Tensor:
        """Divide a block of sums, or of their gradients, with these ranges of windows along split dims."""
        if self.common is not None:
            return block  # the kernel divides
        for i, (counts, r) in enumerate(zip(self.counts, ranges, strict=True)):
            some = counts if r is None else counts[r[0] : r[1]]
            shape = [-1] + [1] * (len(self.counts) - 1 - i)
            block = block / torch.tensor(some, dtype=block.dtype, device=block.device).view(shape)
        return block

    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Whether dividing sums is exact: narrow dtypes would round twice, integers divide differently."""
        return dtype.is_floating_point if self.common is not None else dtype in (torch.float32, torch.float64)


def _divisors(pool: _Pool, named: dict[str, Any], results: Sequence[int]) -> _Divisors:
    counts = []
    for w, n, m in zip(pool.windows, pool.sizes, results[-len(pool.sizes) :], strict=True):
        ends = [(i * w.stride - w.padding, i * w.stride - w.padding + w.size) for i in range(m)]
        if named["count_include_pad"]:
            counts.append(tuple(min(b, n + w.padding) - a for a, b in ends))
        else:
            counts.append(tuple(min(b, n) - max(a, 0) for a, b in ends))
    common = math.prod(c[0] for c in counts) if all(len(set(c)) == 1 for c in counts) else None
    return _Divisors(tuple(counts), named["divisor_override"] or common)


def _average(nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    """Sums over windows, divided by the number of positions that count in the full tensor."""
    func, x = call.func, call.named["self"]
    partial = {a: op for a, op in x._spec.layout.partial if op in ("sum", "avg")}  # the mean is linear
    layout, out = x._spec.layout.with_partial(partial), resolution.outputs[0]
    pool = _pool(nd, call, layout, x.shape, out.shape)
    if pool is None:
        return None
    divisors = _divisors(pool, call.named, out.shape)
    if not divisors.is_exact_in(x.dtype):
        return None
    target = resize_dims(layout, out.shape[-nd:])

    def compute(coord: Coord, x: Tensor) -> Tensor:
        shape = block_shape(target, coord)
        if 0 in shape:
            return x.new_empty(shape)
        for h in pool.split:
            x = h.pad(coord, x)
        sums = func(x, *pool.block_arguments, pool.ceil_mode, True, divisors.common or 1)
        return divisors.divide(sums, [None if h is None else h.windows(coord) for h in pool.halos])

    steps = [plan_to(x, layout), plan_to_windows(pool.split, layout, x.dtype.itemsize)]
    return block_program(call, out.with_layout(target), [Operand("self", steps)], compute)


def _average_backward(nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    func, grad, x = call.func, call.named["grad_output"], call.named["self"]
    if not isinstance(x, DTensor) or not isinstance(grad, DTensor):
        return None
    layout, out = x._spec.layout.with_partial({}), resolution.outputs[0]
    pool = _pool(nd, call, layout, x.shape, grad.shape)
    if pool is None:
        return None
    divisors = _divisors(pool, call.named, grad.shape)
    if not divisors.is_exact_in(grad.dtype):
        return None
    windows = resize_dims(layout, grad.shape[-nd:])

    def compute(coord: Coord, grad: Tensor) -> Tensor:
        shape = block_shape(layout, coord)
        if 0 in grad.shape or 0 in shape:
            return grad.new_zeros(shape)
        covered = list(shape)
        for h in pool.split:
            low, high = h.touched(coord)[1]
            covered[h.dim] = high - low
        terms = divisors.divide(grad, [None if h is None else h.touching(coord) for h in pool.halos])
        like = grad.new_empty(covered)  # only its shape is read
        result: Tensor = func(terms, like, *pool.block_arguments, pool.ceil_mode, True, divisors.common or 1)
        for h in pool.split:
            result = h.crop(coord, result)
        return result

    steps = [plan_to(grad, windows), plan_to_positions(pool.split, windows, grad.dtype.itemsize)]
    return block_program(call, out.with_layout(layout), [Operand("grad_output", steps)], compute)


def _unravel(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The position along each dim of an index into the flattened dims."""
    positions: list[Tensor] = []
    for n in reversed(sizes):
        positions.insert(0, index % n)
        index = index // n
    return positions


def _ravel(positions: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    index = positions[0]
    for position, n in zip(positions[1:], sizes[1:], strict=True):
        index = index * n + position
    return index


def _maximum(nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    """A maximum over windows, and its index in the full tensor."""
    func, x = call.func, call.named["self"]
    if not x.dtype.is_floating_point:
        return None
    layout, outs = x._spec.layout.with_partial({}), resolution.outputs
    pool = _pool(nd, call, layout, x.shape, outs[0].shape)
    if pool is None:
        return None
    target = resize_dims(layout, outs[0].shape[-nd:])
    dilation = [w.dilation for w in pool.windows]

    def compute(coord: Coord, x: Tensor) -> list[Tensor]:
        shape = block_shape(target, coord)
        if 0 in shape:
            return [x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)]
        for h in pool.split:
            x = h.pad(coord, x, -math.inf)
        values, index = func(x, *pool.block_arguments, dilation, pool.ceil_mode)
        positions = _unravel(index, x.shape[-nd:])
        for i, halo in enumerate(pool.halos):
            if halo is not None:
                positions[i] = _global_position(positions[i], halo, coord)
        return [values, _ravel(positions, pool.sizes)]

    steps = [plan_to(x, layout), plan_to_windows(pool.split, layout, x.dtype.itemsize)]
    specs = [out.with_layout(target) for out in outs]
    return block_program(call, specs, [Operand("self", steps)], compute)


def _global_position(position: Tensor, h: Halo, coord: Coord) -> Tensor:
    """The position in the dim of a position in a padded block.

    Padding is the maximum only if the entire window is -inf; torch then returns its first one in the dim.
    """
    position = position + h.covered(coord)[0][0]
    step = h.window.dilation
    return torch.where(position < 0, position % step, position) if step > 1 else position.clamp(min=0)


def _maximum_backward(nd: int, call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank gets the windows that touch its positions, and adds up those with their maximum there."""
    grad, x, indices = (call.named[name] for name in ("grad_output", "self", "indices"))
    if not all(isinstance(t, DTensor) for t in (grad, x, indices)):
        return None
    layout, out = x._spec.layout.with_partial({}), resolution.outputs[0]
    pool = _pool(nd, call, layout, x.shape, grad.shape)
    if pool is None:
        return None
    windows = resize_dims(layout, grad.shape[-nd:])

    def compute(coord: Coord, grad: Tensor, indices: Tensor) -> Tensor:
        shape = block_shape(layout, coord)
        result = grad.new_zeros(shape)
        if 0 in grad.shape or 0 in shape:
            return result
        positions = _unravel(indices, pool.sizes)
        is_own = torch.ones_like(indices, dtype=torch.bool)
        for i, h in enumerate(pool.halos):
            if h is not None:
                low, high = h.positions(coord)
                is_own &= (positions[i] >= low) & (positions[i] < high)
                positions[i] = positions[i] - low
        index = _ravel(positions, shape[-nd:]).masked_fill(~is_own, 0)
        terms = grad.masked_fill(~is_own, 0)
        result.flatten(-nd).scatter_add_(-1, index.flatten(-nd), terms.flatten(-nd))
        return result

    operands = [
        Operand(name, [plan_to(t, windows), plan_to_positions(pool.split, windows, t.dtype.itemsize)])
        for name, t in (("grad_output", grad), ("indices", indices))
    ]
    return block_program(call, out.with_layout(layout), operands, compute)


ALTERNATIVES: dict[Any, Propose] = {
    op: partial(propose, nd)
    for nd in (2, 3)
    for name, propose in (
        (f"avg_pool{nd}d", _average),
        (f"avg_pool{nd}d_backward", _average_backward),
        (f"max_pool{nd}d_with_indices", _maximum),
        (f"max_pool{nd}d_with_indices_backward", _maximum_backward),
    )
    for op in [getattr(aten, name).default]
}
