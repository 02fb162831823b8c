"""Convolution over split positions by halo exchange.

The input of a convolution has the positions and its output the windows; in a transposed convolution, and in
a gradient, it is the other way round. So there are two cases: positions go to the windows that cover them, or
windows to the positions that they touch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives import grouped_convolution
from shardwise.alternatives.alternative import Alternative, Propose
from shardwise.alternatives.exchange import Operand, block_program, plan_to
from shardwise.alternatives.halo import Halo, plan_to_positions, plan_to_windows, resize_dims, split_halos
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout, Spec, block_shape
from shardwise.plan import Plan
from shardwise.plan.settings import current_costs
from shardwise.plan.windows import Window
from shardwise.tensor.dtensor import DTensor

__all__ = ["ALTERNATIVES"]

aten = torch.ops.aten


class _Convolution(NamedTuple):
    """The numbers of a convolution, and the halos of its split dims."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    halos: tuple[Halo, ...]

    def block_arguments(self) -> tuple[Any, ...]:
        """The arguments for blocks with their halos: split dims are padded already."""
        split = {h.dim - 2 for h in self.halos}
        padding = [0 if i in split else p for i, p in enumerate(self.padding)]
        output_padding = [0 if i in split else p for i, p in enumerate(self.output_padding)]
        return self.stride, padding, self.dilation, self.transposed, output_padding, self.groups


def _convolution(
    call: OpCall, layout: Layout, inputs: torch.Size, outputs: torch.Size
) -> _Convolution | None:
    """The convolution of a call whose input has this layout; None if there are no halos to exchange."""
    named, nd = call.named, len(inputs) - 2
    if nd < 1 or len(named["weight"].shape) != len(inputs) or 0 in inputs or 0 in outputs:
        return None
    each = [list(named[name]) for name in ("stride", "padding", "dilation", "output_padding")]
    stride, padding, dilation, output_padding = (v * nd if len(v) == 1 else v for v in each)
    kernel, transposed = named["weight"].shape[2:], named["transposed"]
    windows = [Window(*w) for w in zip(kernel, stride, padding, dilation, strict=True)]
    sizes, counts = (outputs[2:], inputs[2:]) if transposed else (inputs[2:], outputs[2:])
    halos = split_halos(layout, windows, sizes, counts)
    if halos is None:
        return None
    return _Convolution(stride, padding, dilation, transposed, output_padding, named["groups"], halos)


def _input_layout(x: DTensor) -> Layout:
    """The layout of the input: channels unsplit and no pending reduction, for the weight is replicated."""
    return x._spec.layout.with_dim(1, Factor(x.shape[1])).with_partial({})


def _plan_to_replicated(t: Any) -> Plan | None:
    return plan_to(t, Layout.replicated(t.shape, t._spec.layout.axes)) if isinstance(t, DTensor) else None


def _forward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """The output is split as the input is."""
    x, w, b = (call.named[name] for name in ("input", "weight", "bias"))
    if not isinstance(x, DTensor):
        return None
    layout, out = _input_layout(x), resolution.outputs[0]
    conv = _convolution(call, layout, x.shape, out.shape)
    if conv is None:
        return None
    target = resize_dims(layout.with_dim(1, Factor(out.shape[1])), out.shape[2:])
    plan_halos = plan_to_positions if conv.transposed else plan_to_windows

    def compute(coord: Coord, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shape = block_shape(target, coord)
        if 0 in shape:
            return x.new_empty(shape)
        for h in () if conv.transposed else conv.halos:
            x = h.pad(coord, x)
        if 0 in x.shape:  # no window touches the block
            y = x.new_zeros(shape)
        else:
            y = aten.convolution.default(x, w, None if conv.transposed else b, *conv.block_arguments())
            for h in conv.halos if conv.transposed else ():
                y = h.crop(coord, y)
        return y if b is None or not conv.transposed else y + b.view(-1, *[1] * (y.dim() - 2))

    operands = [
        Operand("input", [plan_to(x, layout), plan_halos(conv.halos, layout, x.dtype.itemsize)]),
        Operand("weight", [_plan_to_replicated(w)]),
        Operand("bias", [_plan_to_replicated(b)]),
    ]
    return block_program(call, out.with_layout(target), operands, compute)


def _backward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank computes the gradient of its input positions, and partial sums of those of weight and bias.

    A product of a position and a window is computed where its input is, so that it counts once.
    """
    grad, x, w = (call.named[name] for name in ("grad_output", "input", "weight"))
    if not isinstance(x, DTensor) or not isinstance(grad, DTensor):
        return None
    layout = _input_layout(x)
    conv = _convolution(call, layout, x.shape, grad.shape)
    if conv is None:
        return None
    output = resize_dims(layout.with_dim(1, Factor(grad.shape[1])), grad.shape[2:])
    mask = list(call.named["output_mask"])
    plan_halos = plan_to_windows if conv.transposed else plan_to_positions
    exchange = plan_halos(conv.halos if mask[0] or mask[1] else (), output, grad.dtype.itemsize)
    partial = dict.fromkeys(layout.sharded, "sum")
    outputs = iter(resolution.outputs)
    specs: list[Spec | None] = [next(outputs) if wanted else None for wanted in mask]
    for i, spec in enumerate(specs):
        if spec is not None:
            replicated = Layout.replicated(spec.shape, layout.axes)
            specs[i] = spec.with_layout(layout if i == 0 else replicated.with_partial(partial))

    def compute(coord: Coord, grad: Tensor, with_halo: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        skip = not (mask[0] or mask[1])
        of_input, of_weight = (None, None) if skip else _gradients(conv, coord, with_halo, x, w, mask)
        of_bias = grad.sum([d for d in range(grad.dim()) if d != 1]) if mask[2] else None
        return [g for g in (of_input, of_weight, of_bias) if g is not None]

    operands = [
        Operand("grad_output", [plan_to(grad, output), (None, exchange)]),
        Operand("input", [plan_to(x, layout)]),
        Operand("weight", [_plan_to_replicated(w)]),
    ]
    return block_program(call, specs, operands, compute)


def _gradients(
    conv: _Convolution, coord: Coord, grad: Tensor, x: Tensor, w: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of a block of the input, and the block's share of the weight's."""
    own = x
    for h in conv.halos:
        x = x if conv.transposed else h.embed(coord, x)
        grad = h.pad(coord, grad) if conv.transposed else grad
    if 0 in x.shape or 0 in grad.shape:
        return (torch.zeros_like(own) if mask[0] else None), (torch.zeros_like(w) if mask[1] else None)
    of_input, of_weight, _ = aten.convolution_backward.default(
        grad, x, w, None, *conv.block_arguments(), [mask[0], mask[1], False]
    )
    if mask[0] and not conv.transposed:
        for h in conv.halos:
            of_input = h.crop(coord, of_input)
    return of_input, of_weight


def _cheapest(*proposals: Propose) -> Propose:
    def propose(call: OpCall, resolution: Resolution | None) -> Alternative | None:
        found = [a for p in proposals if (a := p(call, resolution)) is not None]
        return min(found, key=lambda a: current_costs().total(a.plans or ()), default=None)

    return propose


ALTERNATIVES: dict[Any, Propose] = {
    aten.convolution.default: _cheapest(_forward, grouped_convolution.forward),
    aten.convolution_backward.default: _cheapest(_backward, grouped_convolution.backward),
}
