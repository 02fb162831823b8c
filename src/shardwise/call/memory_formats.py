"""The order of the dims of convolutions: channels last if the strides of an operand allow that reading.

A tensor with one channel, or one pixel, may be read both ways. Kernels on devices then choose channels last, and torch's
meta kernel the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["convolution", "is_channels_last"]

aten = torch.ops.aten


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides are in the order batch, pixels, channel: those of torch's kernels, which allow gaps between elements.

    >>> is_channels_last((2, 3, 4, 5), (60, 1, 15, 3)), is_channels_last((2, 3, 4, 5), (60, 20, 5, 1))
    (True, False)
    >>> is_channels_last((2, 1, 1, 5), (5, 1, 5, 1)), is_channels_last((2, 1, 1, 5), (5, 5, 5, 1))
    (True, False)
    """
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[d] == 0 or stride[d] < least:
            return False
        if d == 0 and least == stride[1]:  # one channel and one pixel
            return False
        least = stride[d] * max(shape[d], 1)
    return True


def convolution(x: Tensor, weight: Tensor, bias: Any, *args: Any) -> Tensor:
    """The output of a convolution on the meta device, with the strides that kernels give it."""
    out: Tensor = aten.convolution.default(x, weight, bias, *args)
    if x.dim() == 3:  # torch runs conv1d as conv2d, of a contiguous input
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    form: torch.memory_format = torch.contiguous_format
    if any(is_channels_last(t.shape, t.stride()) for t in (x, weight)):
        if x.dim() == 4:
            form = torch.channels_last
        # the kernels of three dims for float64 and for single samples know one order
        elif out.dtype is not torch.float64 and x.shape[0] > 1:
            form = torch.channels_last_3d
    if out.dim() == 3:
        return out.unsqueeze(2).contiguous(memory_format=form).squeeze(2)
    return out.contiguous(memory_format=form)
