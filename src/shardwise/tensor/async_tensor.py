"""A DTensor whose block is still on its way; a class of its own so that no other tensor pays for the question."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Pending
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor

__all__ = ["Awaited"]

_held: Any = DTensor._local_tensor  # the slot itself


class Awaited(DTensor):
    """What `redistribute(async_op=True)` returns: its block is waited for when something first asks for it."""

    _coming: Pending | None
    __slots__ = ("_coming",)

    @staticmethod
    def __new__(cls, block: Tensor | Pending, spec: Spec, *, requires_grad: bool = False) -> Awaited:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            strides=spec.stride,
            dtype=spec.dtype,
            device=block.device,
            requires_grad=requires_grad,
        )
        self._spec = spec
        if isinstance(block, Pending):
            self._coming = block
        else:
            self._local_tensor = block
        return self

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], kept: tuple[Spec, bool], outer_size: Any, outer_stride: Any
    ) -> Awaited:
        # compiled code is told apart by the classes it was made for
        spec, requires_grad = kept
        return Awaited(inner["_local_tensor"], spec, requires_grad=requires_grad)

    @property
    def _local_tensor(self) -> Tensor:
        if self._coming is not None:
            self._local_tensor = self._coming.wait()
        return _held.__get__(self)  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, block: Tensor) -> None:
        _held.__set__(self, block)
        self._coming = None
