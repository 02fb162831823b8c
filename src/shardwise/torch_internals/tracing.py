"""Dispatch modes and tracing: fake tensors, and the error that makes a compiler break its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "is_tracing", "needs_concrete_values"]


def is_tracing(block: Tensor | None = None) -> bool:
    """Whether ops run on tensors without values, or are recorded into a graph.

    Args:
        block: a tensor that may itself be fake.

    >>> is_tracing(), is_tracing(torch.ones(1))
    (False, False)
    """
    if isinstance(block, FakeTensor) or get_proxy_mode() is not None or torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def needs_concrete_values(func: Any) -> Exception:
    """The error of an op that cannot be traced; `torch.compile` breaks the graph there and runs the op eagerly.

    >>> type(needs_concrete_values(torch.ops.aten.item.default)).__name__
    'DataDependentOutputException'
    """
    return DataDependentOutputException(func)
