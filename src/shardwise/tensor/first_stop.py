"""The first stop of tensors that have a dispatch of their own, and of no others: before autograd, and before composites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_torch_does", "put_first"]

_KEY = "PythonTLSSnapshot"
_HERE = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_past = torch._C._ExcludeDispatchKeyGuard
_library = torch.library.Library("aten", "IMPL")


def put_first(name: str, run: Callable[..., Any]) -> None:
    """Have an op of aten run so, where such a tensor is among its arguments."""
    _library.impl(name, run, _KEY)


def as_torch_does(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Go on past the first stop."""
    with _past(_HERE):
        return func(*args, **kwargs)
