"""Grouped convolution with channels split between groups: each rank has some groups, and nothing moves.

Depthwise convolution, with one channel per group, has a rule. Otherwise input and output have different
numbers of channels per group, and only their layouts tell whether both are split at the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.alternatives.alternative import Alternative
from shardwise.alternatives.exchange import Operand, SplitDim, block_program, plan_to, split_dim
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Resolution
from shardwise.comm import Coord
from shardwise.layout import Factor, Layout, block_shape
from shardwise.tensor.dtensor import DTensor

__all__ = ["backward", "forward"]

aten = torch.ops.aten
_NUMBERS = ("stride", "padding", "dilation", "transposed", "output_padding")


class _Groups(NamedTuple):
    """The layouts of the tensors of a grouped convolution, and the groups of each rank."""

    split: SplitDim
    groups: int
    input: Layout
    weight: Layout
    output: Layout
    bias: Layout

    def on(self, coord: Coord) -> int:
        """The number of groups on a rank."""
        low, high = self.split.ranges(self.groups)[self.split.position(coord)]
        return high - low


def _groups(call: OpCall, inputs: torch.Size, outputs: torch.Size) -> _Groups | None:
    """The layouts, if channels are split between groups; positions must be unsplit."""
    groups, w, layout = call.named["groups"], call.named["weight"].shape, call.named["input"]._spec.layout
    split = split_dim(layout, 1) if len(inputs) == len(w) else None
    if groups == 1 or split is None or not split.axes or 0 in inputs or 0 in outputs:
        return None
    for n in (inputs[1], outputs[1]):
        if split.ranges(n) != tuple((a * n // groups, b * n // groups) for a, b in split.ranges(groups)):
            return None

    def unsplit(sizes: Sequence[int]) -> list[tuple[Factor, ...]]:
        return [(Factor(n),) for n in sizes]

    def batched(shape: torch.Size) -> Layout:
        return Layout(layout.axes, [layout.dims[0], (Factor(shape[1], split.axes),), *unsplit(shape[2:])])

    weight = Layout(layout.axes, [(Factor(w[0], split.axes),), *unsplit(w[1:])])
    bias = Layout(layout.axes, [(Factor(outputs[1], split.axes),)])
    return _Groups(split, groups, batched(inputs), weight, batched(outputs), bias)


def forward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank convolves its groups."""
    x, w, b = (call.named[name] for name in ("input", "weight", "bias"))
    if not all(isinstance(t, DTensor) for t in (x, w, b) if t is not None):
        return None
    out = resolution.outputs[0]
    groups = _groups(call, x.shape, out.shape)
    if groups is None:
        return None
    numbers = [call.named[name] for name in _NUMBERS]

    def compute(coord: Coord, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shape = block_shape(groups.output, coord)
        if 0 in shape:
            return x.new_empty(shape)
        return aten.convolution.default(x, w, b, *numbers, groups.on(coord))  # type: ignore[no-any-return]

    operands = [
        Operand("input", [plan_to(x, groups.input)]),
        Operand("weight", [plan_to(w, groups.weight)]),
        Operand("bias", [plan_to(b, groups.bias)]),
    ]
    return block_program(call, out.with_layout(groups.output), operands, compute)


def backward(call: OpCall, resolution: Resolution) -> Alternative | None:
    """Each rank computes the gradients of its groups; if the batch is split, two of them are partial sums."""
    grad, x, w = (call.named[name] for name in ("grad_output", "input", "weight"))
    if not all(isinstance(t, DTensor) for t in (grad, x, w)):
        return None
    groups = _groups(call, x.shape, grad.shape)
    if groups is None:
        return None
    partial = dict.fromkeys(groups.input.sharded - set(groups.split.axes), "sum")
    mask, numbers = list(call.named["output_mask"]), [call.named[name] for name in _NUMBERS]
    layouts = (groups.input, groups.weight.with_partial(partial), groups.bias.with_partial(partial))
    outputs = iter(resolution.outputs)
    specs = [
        next(outputs).with_layout(t) if wanted else None for t, wanted in zip(layouts, mask, strict=True)
    ]

    def compute(coord: Coord, grad: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        if 0 in grad.shape or 0 in x.shape:
            shapes = [x.shape, w.shape, grad.shape[1:2]]
            return [grad.new_zeros(s) for s, wanted in zip(shapes, mask, strict=True) if wanted]
        sizes = list(grad.shape[1:2])
        every = aten.convolution_backward.default(grad, x, w, sizes, *numbers, groups.on(coord), mask)
        return [g for g, wanted in zip(every, mask, strict=True) if wanted]

    operands = [
        Operand("grad_output", [plan_to(grad, groups.output)]),
        Operand("input", [plan_to(x, groups.input)]),
        Operand("weight", [plan_to(w, groups.weight)]),
    ]
    return block_program(call, specs, operands, compute)
