"""Functional collectives."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_gather", "wait"]


def all_gather(t: Tensor, n: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(t, n, group)  # type: ignore[no-any-return]


def wait(t: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(t)  # type: ignore[no-any-return]


def all_reduce(t: Tensor, op: str, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(t, op, group)  # type: ignore[no-any-return]
