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
    if not isinstance(index, tuple):
        return _replicated(x, index, 0)
    return tuple(_replicated(x, i, dim) for i, dim in zip(index, _dims(x, index), strict=True))


def _dims(x: DTensor, index: tuple[Any, ...]) -> list[int]:
    """The dim of `x` that each part of an index applies to."""
    counts = [_consumed(i) for i in index]
    missing = x.dim() - sum(counts)
    dims, dim = [], 0
    for i, n in zip(index, counts, strict=True):
        dims.append(dim)
        dim += missing if i is Ellipsis else n
    return dims


def _consumed(index: Any) -> int:
    """How many dims a part of an index applies to."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, Tensor) or hasattr(index, "__array__"):
        return int(index.ndim) if index.dtype in (torch.bool, torch.uint8, bool) else 1
    return 1


def _check_range(x: DTensor, index: Tensor, dim: int) -> None:
    """Raise on all ranks alike for a position that is out of range; the kernel would see it on some ranks only."""
    if index.dtype in (torch.bool, torch.uint8) or dim >= x.dim() or 0 in (x.numel(), index.numel()):
        return
    size = x.shape[dim]
    for position in (int(index.max()), int(index.min())):
        if not -size <= position < size:
            raise IndexError(f"index {position} is out of bounds for dimension {dim} with size {size}")


def _replicated(x: DTensor, index: Any, dim: int) -> Any:
    if isinstance(index, Tensor):
        refused = current_settings().plain in ("error", "losses")
        if refused and not isinstance(index, DTensor) and index.numel() != 1:
            raise mixed_tensors_error("x[index]", index, x._spec)
        return index
    is_sequence = isinstance(index, list | tuple | range) or hasattr(index, "__array__")
    if not is_sequence or _holds_tensors(index):
        return index
    try:
        plain = torch.as_tensor(list(index) if isinstance(index, range) else index)
    except (TypeError, ValueError, RuntimeError):
        return index  # torch raises its own error
    if plain.numel() == 0 and not hasattr(index, "dtype"):
        plain = plain.long()  # an empty list indexes nothing
    if plain.dim() == 0:
        return index
    if plain.device.type == "cpu" and not plain.is_floating_point():
        _check_range(x, plain, dim)
    plain = plain.to(x.device)
    return replicate(plain, x.device_mesh, simulated=is_simulated_tensor(x))


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)
