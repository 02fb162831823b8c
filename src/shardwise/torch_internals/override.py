"""Ops whose C++ code does with tensors what no DTensor can do: reads values before any op runs, or makes plain ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.tensor.dtensor import DTensor

__all__ = ["beneath", "give_values", "instead_of"]

_KEY = "PythonTLSSnapshot"  # the first stop of tensors with a dispatch of their own, and of no others
_HERE = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_past = torch._C._ExcludeDispatchKeyGuard
_library = torch.library.Library("aten", "IMPL")


def beneath() -> AbstractContextManager[None]:
    """Inside, ops run as torch runs them: what was put before it is passed by."""
    return _past(_HERE)


def instead_of(
    func: Any,
    run: Callable[..., Any],
    when: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True,
) -> None:
    """Run something else where an op gets DTensors, above autograd."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if when(args, kwargs) and any(isinstance(t, DTensor) for t in tree_leaves([args, kwargs])):
            return run(*args, **kwargs)
        with _past(_HERE):
            return func(*args, **kwargs)

    _library.impl(
        func._schema.name.removeprefix("aten::") + f".{func._overloadname}".removesuffix(".default"),
        kernel,
        _KEY,
    )


def _tensor_split(x: Tensor, indices: Tensor, dim: int = 0) -> Any:
    values: Any = indices.full_tensor().tolist() if isinstance(indices, DTensor) else indices.tolist()
    if indices.dim() == 0:
        return torch.ops.aten.tensor_split.sections(x, values, dim)
    return torch.ops.aten.tensor_split.indices(x, values, dim)


def give_values() -> None:
    """Put our way before torch's for tensors that have a dispatch of their own."""
    instead_of(
        torch.ops.aten.tensor_split.tensor_indices_or_sections,
        _tensor_split,
        lambda args, kwargs: isinstance(args[1], DTensor),
    )
