"""Differences between the supported releases of torch that no other module of this package is the subject of."""

from __future__ import annotations

import torch

__all__ = ["linspace_arithmetic", "torch_release"]


def torch_release() -> tuple[int, int]:
    """The major and minor version of torch.

    >>> torch_release() >= (2, 13)
    True
    """
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


_HALF = {torch.float16, torch.bfloat16}
_HALF_IN_FLOAT32 = torch_release() >= (2, 15)


def linspace_arithmetic(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """How the CPU kernel of `torch.linspace` computes the values of a dtype.

    Returns the dtype it computes in, and whether it rounds `first + index * step` once (a fused multiply-add) or twice.
    Since torch 2.15, 16-bit values are computed in float32; with one rounding in bfloat16 only.

    >>> linspace_arithmetic(torch.int64)
    (torch.float64, True)
    """
    if dtype in _HALF:
        return (torch.float32, dtype is torch.bfloat16) if _HALF_IN_FLOAT32 else (dtype, False)
    if dtype.is_complex:
        return dtype, False
    return (dtype if dtype.is_floating_point else torch.float64), True
