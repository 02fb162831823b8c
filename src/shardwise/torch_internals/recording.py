"""Tensors without values, for capture: fake tensors, the errors of ops that need values, and suspending modes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import Buffer, Parameter
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "VALUE_ERRORS",
    "empty_fake",
    "has_plain_types",
    "is_fake",
    "new_fake_mode",
    "without_modes",
]

VALUE_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""What ops raise that need the values of a tensor which has none."""

_PLAIN = frozenset({Tensor, Parameter, Buffer, FakeTensor})


def new_fake_mode() -> Any:
    """A mode in which new tensors have a shape, a dtype and a device, and no values.

    >>> with new_fake_mode():
    ...     is_fake(torch.ones(2))
    True
    """
    return FakeTensorMode(allow_non_fake_inputs=False)


def is_fake(x: Any) -> bool:
    """Whether a tensor is one of a fake mode.

    >>> is_fake(torch.ones(2))
    False
    """
    return isinstance(x, FakeTensor)


def empty_fake(mode: Any | None, shape: Sequence[int], stride: Sequence[int], like: Tensor) -> Tensor:
    """A fake tensor of this shape with the dtype and device of another tensor; without a mode, on the meta device.

    >>> empty_fake(new_fake_mode(), (2, 3), (3, 1), torch.ones(1)).shape
    torch.Size([2, 3])
    """
    if mode is None:
        with without_modes():
            return torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
    with without_modes(), mode:
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


def has_plain_types(types: Sequence[type]) -> bool:
    """Whether the types of an op's tensors are torch's own, so that a mode may run the op itself.

    >>> has_plain_types([Tensor]), has_plain_types([type("Other", (Tensor,), {})])
    (True, False)
    """
    return _PLAIN.issuperset(types)


def without_modes() -> AbstractContextManager[Any]:
    """Run ops as outside of all dispatch modes.

    >>> with new_fake_mode(), without_modes():
    ...     is_fake(torch.ones(2))
    False
    """
    return _disable_current_modes()
