"""Running models in float64 that convert parts of their computation to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Float64"]


class Float64(TorchFunctionMode):
    """Inside the block, functions that are told to use float32 use float64.

    Models upcast norms, rotary embeddings, softmax and losses from 16 bits. In float64 that would be a downcast, and
    another order of a sum would then differ by 1e-7 instead of 1e-16.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with float64 in place of float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_wide(a) for a in args)
        return func(*args, **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
