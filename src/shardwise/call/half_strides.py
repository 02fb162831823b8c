"""Strides of elementwise ops on expanded tensors of half precision.

Torch's meta kernels convert such operands first, and give the result the strides of the copies; kernels convert nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.call.schema import op_info

__all__ = ["depends_on_precision", "in_single_precision", "with_strides_of"]

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_UNTAGGED = frozenset({aten.rsub.Tensor, aten.mse_loss.default, aten.smooth_l1_loss.default})
"""Elementwise ops without torch's tag of such."""


def depends_on_precision(func: Any, values: Sequence[Any]) -> bool:
    """Whether a meta kernel may give the result of an op other strides than in single precision."""
    if torch.Tag.pointwise not in op_info(func).tags and func not in _UNTAGGED:
        return False
    tensors = [t for t in values if isinstance(t, Tensor)]
    return any(t.dtype in _HALF for t in tensors) and any(
        n > 1 and s == 0 for t in tensors for n, s in zip(t.shape, t.stride(), strict=True)
    )


def in_single_precision(tree: Any) -> Any:
    """The tree with each meta tensor of half precision in single precision."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _HALF:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=torch.float32, device="meta")

    return map_leaves(leaf, tree)


def with_strides_of(like: Any, result: Any) -> Any:
    """The result of an op with the strides of another one."""
    if not isinstance(result, Tensor) or not isinstance(like, Tensor):
        return result
    return result.new_empty_strided(result.shape, like.stride())
