"""Maxima and minima along a split dim with their indices: reduce the values first, then the indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose, reduce_pending
from shardwise.alternatives.exchange import Operand, block_program, split_dim
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout
from shardwise.plan import plan_redistribute
from shardwise.tensor.construct import from_function, indices_along
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _flat_index(x: DTensor, dims: Sequence[int]) -> DTensor:
    """The index into some dims flattened, in the tensor's layout; its other dims have size 1."""
    layout, device = x._spec.layout, x.device  # in a dry run the device is meta, and this costs nothing

    def values(shape: tuple[int, ...], owned: Sequence[Sequence[int]]) -> Tensor:
        index = torch.zeros((), dtype=torch.int64, device=device)
        for d in dims:
            along = indices_along(owned, d, device)
            index = index * x.shape[d] + along.view([-1 if e == d else 1 for e in range(x.dim())])
        return index

    factors = [layout.dims[d] if d in dims else (Factor(1),) for d in range(x.dim())]
    return from_function(Layout(layout.axes, factors), values, torch.int64, False, x.device_mesh)


def _find(func: Any, x: DTensor, dims: list[int], largest: bool) -> tuple[Tensor, Tensor]:
    """The extreme over some dims, and its first index into those dims flattened."""
    best = x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    best = reduce_pending(func, best)
    is_best = x == best
    if x.dtype.is_floating_point:
        is_best = is_best | x.isnan()  # if there is a NaN, torch takes the first one for the extreme
    count = math.prod(x.shape[d] for d in dims)
    index = torch.where(is_best, _flat_index(x, dims), count).amin(dims, keepdim=True)
    return best, reduce_pending(func, index)


def _argmax(func: Any, largest: bool) -> Callable[..., Any]:
    def run(x: DTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        dims = list(range(x.dim())) if dim is None else [dim % x.dim()]
        _, index = _find(func, x, dims, largest)
        return index if keepdim else index.squeeze(dims)

    return run


def _max(func: Any, largest: bool) -> Callable[..., Any]:
    def run(x: DTensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        best, index = _find(func, x, [dim % x.dim()], largest)
        return (best, index) if keepdim else (best.squeeze(dim), index.squeeze(dim))

    return run


def _aminmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Two reductions that stay pending."""
    dims = list(range(x.dim())) if dim is None else [dim]
    return x.amin(dims, keepdim=keepdim), x.amax(dims, keepdim=keepdim)


def _by_reduction(program: Callable[..., Any], call: OpCall, resolution: Resolution) -> Alternative | None:
    """Propose a program that reduces values and indices, for a call whose rule would gather the rows."""
    x: DTensor = call.args[0]
    if resolution.moves[0] is None or x._spec.layout.partial or 0 in x.shape:
        return None
    return None if x.dtype.is_complex or x.dim() == 0 else Alternative(program)


def _topk(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Gather the k extremes of each block, and take the k extremes of those; each block must have k."""
    x: DTensor = call.named["self"]
    k, largest, in_order = (call.named[name] for name in ("k", "largest", "sorted"))
    layout = x._spec.layout
    if layout.partial or not x.dim() or not k or 0 in x.shape:
        return None
    d = call.named["dim"] % x.dim()
    split = split_dim(layout, d)
    if split is None or not split.axes:
        return None
    ranges = split.ranges(x.shape[d])
    if ranges[-1][1] - ranges[-1][0] < k:
        return None

    def of_block(coord: Coord, block: Tensor) -> tuple[Tensor, Tensor]:
        values, index = block.topk(k, d, largest, True)
        return values, index + ranges[split.position(coord)][0]

    def of_gathered(coord: Coord, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        best, index = values.topk(k, d, largest, in_order)
        return best, indices.gather(d, index)

    candidates = split.resize(layout, k * len(ranges))
    gather = tuple(
        plan_redistribute(candidates, candidates.without(split.axes), out.dtype.itemsize)
        for out in resolution.outputs
    )
    specs = [out.with_layout(layout.with_dim(d, Factor(k))) for out in resolution.outputs]
    return block_program(call, specs, [Operand("self")], of_block, gather, of_gathered)


ALTERNATIVES: dict[Any, Propose] = {
    aten.argmax.default: partial(_by_reduction, _argmax(aten.argmax.default, largest=True)),
    aten.argmin.default: partial(_by_reduction, _argmax(aten.argmin.default, largest=False)),
    aten.max.dim: partial(_by_reduction, _max(aten.max.dim, largest=True)),
    aten.min.dim: partial(_by_reduction, _max(aten.min.dim, largest=False)),
    aten.aminmax.default: partial(_by_reduction, _aminmax),
    aten._aminmax.default: partial(_by_reduction, _aminmax),
    aten._aminmax.dim: partial(_by_reduction, _aminmax),
    aten.topk.default: _topk,
}
