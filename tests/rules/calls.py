"""What calls to try rows on are made of: tensors of numbers that differ, and indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def x(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers of both signs, no two alike where there are enough of them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=_rng(seed)).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=_rng(seed), dtype=dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=_rng(seed)).to(dtype)


def index(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_rng(high))


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs
