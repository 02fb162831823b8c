"""Comparing results up to rounding, and describing the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["describe", "difference"]

_MOST_SHOWN = 24
# How far sums may differ that are taken in another order, by dtype.
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def difference(got: Any, want: Any, *, values: bool = True, coarsest: Sequence[torch.dtype] = ()) -> str:
    """The first difference between two results, or "" if they agree up to the order of summation.

    Args:
        got: the result.
        want: the expected result.
        values: compare values, not only shape and dtype.
        coarsest: other dtypes in which sums may have been taken.

    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    '2.0 at [1], not 3.0'
    """
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return "" if type(got) is type(want) and got == want else f"{got!r}, not {want!r}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype is not want.dtype:
        return f"{got.dtype}, not {want.dtype}"
    if not values or not want.numel():
        return ""
    a, b = _widen(got), _widen(want)
    tolerance = max(map(_tolerance, (want.dtype, *coarsest))) if _tolerance(want.dtype) else 0.0
    close = torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return ""
    index = (~close).nonzero()[0].tolist()
    return f"{_round(got[tuple(index)].item())} at {index}, not {_round(want[tuple(index)].item())}"


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 1e-4) if dtype.is_floating_point or dtype.is_complex else 0.0


def _widen(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    if t.dtype.is_complex:
        return t.to(torch.complex128)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def describe(t: Tensor) -> str:
    """The values of a tensor, or the first ones if there are many."""
    if t.numel() <= _MOST_SHOWN:
        return str(_round(t.detach().tolist()))
    values = ", ".join(str(_round(x)) for x in t.detach().flatten()[:_MOST_SHOWN].tolist())
    return f"{values}, … ({t.numel()} in all)"


def _round(value: Any) -> Any:
    if isinstance(value, list):
        return [_round(v) for v in value]
    if isinstance(value, complex):
        return complex(_round(value.real), _round(value.imag))
    return float(f"{value:.6g}") if isinstance(value, float) else value
