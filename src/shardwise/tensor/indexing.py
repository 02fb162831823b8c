"""Indices that are given as lists or arrays: each rank has the same ones, so they become replicated index tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.plan.settings import current_settings
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor, is_simulated_tensor
from shardwise.tensor.errors import mixed_tensors_error

__all__ = ["replicated_index"]


def replicated_index(x: DTensor, index: Any) -> Any:
    """The index of `x[index]` with every list or array as a replicated DTensor, as torch would make a plain one."""
    if isinstance(index, tuple):
        return tuple(_replicated(x, i) for i in index)
    return _replicated(x, index)


def _replicated(x: DTensor, index: Any) -> Any:
    if isinstance(index, Tensor):
        if not isinstance(index, DTensor) and index.numel() != 1 and current_settings().plain == "error":
            raise mixed_tensors_error("x[index]", index, x._spec)
        return index
    is_sequence = isinstance(index, list | tuple | range) or hasattr(index, "__array__")
    if not is_sequence or _holds_tensors(index):
        return index
    try:
        plain = torch.as_tensor(list(index) if isinstance(index, range) else index, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        return index  # torch raises its own error
    if plain.numel() == 0 and not hasattr(index, "dtype"):
        plain = plain.long()  # an empty list indexes nothing
    if plain.dim() == 0:
        return index
    return replicate(plain, x.device_mesh, simulated=is_simulated_tensor(x))


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)
