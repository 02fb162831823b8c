"""`unfold` along a split dim: each rank gets the positions that its windows cover; and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, block_program, split_dim
from shardwise.alternatives.halo import Halo, plan_to_positions, plan_to_windows
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


def _halo(call: OpCall, layout: Layout, d: int, size: int, count: int) -> Halo | None:
    split = split_dim(layout, d)
    if split is None or call.named["size"] == 0:
        return None
    return Halo(split, Window(call.named["size"], call.named["step"]), size, count)


def _unfold(call: OpCall, resolution: Resolution) -> Alternative | None:
    x: DTensor = call.named["self"]
    if not x.dim():
        return None
    layout, out, d = x._spec.layout, resolution.outputs[0], call.named["dimension"] % x.dim()
    halo = _halo(call, layout, d, x.shape[d], out.shape[d])
    if halo is None:
        return None
    size, step = halo.window.size, halo.window.stride

    def unfold(coord: Coord, block: Tensor) -> Tensor:
        return block.unfold(d, size, step) if block.shape[d] else block.new_empty(*block.shape, size)

    windows = halo.split.resize(layout, out.shape[d])
    target = windows.with_dims([*windows.dims, (Factor(size),)])
    exchange = plan_to_windows([halo], layout, x.dtype.itemsize)
    return block_program(call, out.with_layout(target), [Operand("self")], exchange, unfold)


def _unfold_backward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank adds up the windows that touch its positions."""
    grad: DTensor = call.named["grad_in"]
    layout = grad._spec.layout
    if grad.dim() < 2 or any(f.axes for f in layout.dims[-1]):
        return None
    if any(op not in ("sum", "avg") for _, op in layout.partial):
        return None  # windows overlap: their sum is not linear in a pending max
    out, d = resolution.outputs[0], call.named["dim"] % (grad.dim() - 1)
    halo = _halo(call, layout, d, out.shape[d], grad.shape[d])
    if halo is None:
        return None
    size, step = halo.window.size, halo.window.stride

    def fold(coord: Coord, block: Tensor) -> Tensor:
        low, high = halo.touched(coord)[1]
        shape = [high - low if e == d else n for e, n in enumerate(block.shape[:-1])]
        if high <= low:
            return halo.crop(coord, block.new_zeros(shape))
        return halo.crop(coord, aten.unfold_backward.default(block, shape, d, size, step))

    positions = halo.split.resize(layout, out.shape[d])
    target = positions.with_dims(positions.dims[:-1])
    exchange = plan_to_positions([halo], layout, grad.dtype.itemsize)
    return block_program(call, out.with_layout(target), [Operand("grad_in")], exchange, fold)


ALTERNATIVES: dict[Any, Propose] = {
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
}
