"""Ops whose C++ code reads the values of a tensor before any op runs: they get the values instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dtensor import DTensor

__all__ = ["give_values"]

_KEY = "PythonTLSSnapshot"  # the first stop of tensors with a dispatch of their own, and of no others
_library = torch.library.Library("aten", "IMPL")


def _tensor_split(x: Tensor, indices: Tensor, dim: int = 0) -> Any:
    if isinstance(indices, DTensor):
        values: Any = indices.full_tensor().tolist()
        if indices.dim() == 0:
            return torch.ops.aten.tensor_split.sections(x, values, dim)
        return torch.ops.aten.tensor_split.indices(x, values, dim)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
    with torch._C._ExcludeDispatchKeyGuard(key):
        return torch.ops.aten.tensor_split.tensor_indices_or_sections(x, indices, dim)


def give_values() -> None:
    """Put our way before torch's for tensors that have a dispatch of their own."""
    _library.impl("tensor_split.tensor_indices_or_sections", _tensor_split, _KEY)
