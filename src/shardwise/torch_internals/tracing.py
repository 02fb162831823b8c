"""Dispatch modes and tracing: fake tensors, and the error that makes a compiler break its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "is_recorded", "is_tracing", "needs_concrete_values"]


def is_tracing() -> bool:
    """Whether ops run on tensors without values, for a compiler.

    >>> is_tracing()
    False
    """
    fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake_mode is not None or torch.compiler.is_compiling()


def is_recorded(block: Tensor) -> bool:
    """Whether a tensor has no values, or ops on it are recorded into a graph.

    >>> is_recorded(torch.ones(1))
    False
    """
    return isinstance(block, FakeTensor) or get_proxy_mode() is not None


def needs_concrete_values(func: Any) -> Exception:
    """The error of an op that cannot be traced; `torch.compile` breaks the graph there and runs the op eagerly.

    >>> type(needs_concrete_values(torch.ops.aten.item.default)).__name__
    'DataDependentOutputException'
    """
    return DataDependentOutputException(func)
