"""`max_pool1d` without gradients: torch has a kernel for plain tensors alone, whose result is contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.autograd import has_tangent
from shardwise.torch_internals.patches import KernelPatch, beneath_patches

__all__ = ["pooling_patches"]

aten = torch.ops.aten


def pooling_patches() -> list[KernelPatch]:
    """The patches of poolings."""
    reason = (
        "torch pools tensor subclasses by the kernel of two dims, whose result has the strides of the input"
    )
    return [KernelPatch(aten.max_pool1d.default, _max_pool1d, reason, _needs_no_grad)]


def _needs_no_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = args[0]
    needs_grad = isinstance(x, DTensor) and x.requires_grad and torch.is_grad_enabled()
    return isinstance(x, DTensor) and x.device.type == "cpu" and not needs_grad and not has_tangent(x)


def _max_pool1d(*args: Any, **kwargs: Any) -> Tensor:
    with beneath_patches():
        out: Any = torch.max_pool1d(*args, **kwargs).contiguous()
    return DTensor(
        out._local_tensor, out._spec
    )  # torch removes a dim; the kernel's result is a view of nothing
