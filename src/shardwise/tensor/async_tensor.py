"""The DTensor that an asynchronous redistribution returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.comm import Pending
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor, local_slot
from shardwise.torch_internals.collectives import waiting
from shardwise.torch_internals.subclass import make_wrapper

__all__ = ["AsyncDTensor"]


class AsyncDTensor(DTensor):
    """The result of `redistribute(async_op=True)`: it waits for its block when that is first used.

    A subclass, so that other tensors need no check.
    """

    _pending: Pending | None
    __slots__ = ("_pending",)
    _can_change_places = False  # it has a slot that other DTensors have not

    @staticmethod
    def __new__(cls, block: Tensor | Pending, spec: Spec, *, requires_grad: bool = False) -> AsyncDTensor:
        self = make_wrapper(
            cls,
            spec.shape,
            strides=spec.stride,
            dtype=spec.dtype,
            device=block.device,
            requires_grad=requires_grad,
        )
        self._spec = spec
        if isinstance(block, Pending):
            self._pending = block
        else:
            self._local_tensor = block
        return self

    def unfinished_block(self) -> Tensor | None:
        """The block as torch's `AsyncCollectiveTensor`, which waits when it is read; None if it must be unpacked first."""
        coming = None if self._pending is None else self._pending.coming
        return None if coming is None else waiting(coming)

    def view(self, *shape: Any) -> Tensor:
        """The tensor in another shape; in its own shape it does not wait."""
        pending = self._pending
        if pending is None or self.requires_grad or shape not in ((self.shape,), tuple(self.shape)):
            return super().view(*shape)
        return AsyncDTensor(pending, self._spec)

    @property
    def _local_tensor(self) -> Tensor:
        if self._pending is not None:
            self._local_tensor = self._pending.wait()
        return local_slot.__get__(self)  # type: ignore[no-any-return]

    @_local_tensor.setter
    def _local_tensor(self, block: Tensor) -> None:
        local_slot.__set__(self, block)
        self._pending = None
