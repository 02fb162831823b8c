"""Tensor subclasses without storage of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

__all__ = ["make_wrapper"]

_T = TypeVar("_T", bound=torch.Tensor)


def make_wrapper(
    cls: type[_T],
    size: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    layout: torch.layout = torch.strided,
    dispatch_layout: bool = False,
    requires_grad: bool = False,
) -> _T:
    """A tensor of class `cls` with this metadata and no storage, whose ops go to the class's `__torch_dispatch__`.

    Args:
        strides: None for sparse layouts, which have none.
        dispatch_layout: let ops that ask for the layout go to `__torch_dispatch__`, as sparse kinds need it.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        size,
        strides=strides,
        dtype=dtype,
        device=device,
        layout=layout,
        dispatch_layout=dispatch_layout,
        requires_grad=requires_grad,
    )
