"""Building blocks of the calls that rows are verified on: tensors of distinct numbers, and indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def x(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers of both signs, distinct where the dtype has enough of them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=_rng(seed)).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=_rng(seed), dtype=dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=_rng(seed)).to(dtype)


def index(high: int, *shape: int) -> Tensor:
    """Indices from 0 up to `high`."""
    return torch.randint(0, high, shape, generator=_rng(high))


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def name_of(func: Any) -> str:
    """The name of an op as rows have it."""
    return f"{func._schema.name.replace('::', '.')}.{func._overloadname}"


def copy_tensors(value: Any) -> Any:
    """Arguments with copies of their tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(copy_tensors(v) for v in value)
    return {k: copy_tensors(v) for k, v in value.items()} if isinstance(value, dict) else value
