"""`copy.deepcopy` of a DTensor: copies of its blocks, which share memory where the blocks did."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor

from shardwise.comm import PerRank
from shardwise.layout import Spec
from shardwise.tensor.view_places import REPLACED
from shardwise.torch_internals.subclass import is_parameter

__all__ = ["CopyMethods", "copy_block"]


class CopyMethods:
    """What `copy.deepcopy` asks a tensor for."""

    _local_tensor: Tensor
    _spec: Spec
    __slots__ = ()

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol.\n"
                "  why: A copy has no place in the autograd graph that computed this tensor.\n"
                "  fix: copy.deepcopy(x.detach())"
            )
        # a copy of a parameter shares no memory with other copies, as in torch
        copy = self._copy_blocks({} if is_parameter(self) else memo)
        copy.requires_grad_(self.requires_grad)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.pop(REPLACED, None)
        memo[id(self)] = copy
        if self.grad is not None and not is_parameter(self):  # torch copies a parameter without its gradient
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def _copy_blocks(self: Any, memo: dict[int, Any]) -> Any:
        """A tensor with copies of the blocks."""
        return type(self)(copy_block(self._local_tensor, memo), self._spec)


def copy_block(block: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a block; blocks that share memory have copies that do, as far as they are copied with the same memo."""
    if isinstance(block, PerRank):
        return PerRank({r: deepcopy(t.detach(), memo) for r, t in block._blocks.items()})
    return deepcopy(block.detach(), memo)
