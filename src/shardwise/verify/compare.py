"""What is different between two tensors, in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["difference", "shown"]

_MOST_SHOWN = 24
# How far sums that are taken in another order may be apart, by dtype.
_APART = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def difference(got: Any, want: Any, *, values: bool = True, coarsest: Sequence[torch.dtype] = ()) -> str:
    """Empty if two results agree, up to the order in which sums are taken; else where they do not.

    Sums may have been taken in any of the dtypes in `coarsest`, too.

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
    a, b = _wide(got), _wide(want)
    apart = max(map(_apart, (want.dtype, *coarsest))) if _apart(want.dtype) else 0.0
    close = torch.isclose(a, b, rtol=apart, atol=apart, equal_nan=True)
    if bool(close.all()):
        return ""
    at = (~close).nonzero()[0].tolist()
    return f"{_rounded(got[tuple(at)].item())} at {at}, not {_rounded(want[tuple(at)].item())}"


def _apart(dtype: torch.dtype) -> float:
    return _APART.get(dtype, 1e-4) if dtype.is_floating_point or dtype.is_complex else 0.0


def _wide(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    if t.dtype.is_complex:
        return t.to(torch.complex128)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def shown(t: Tensor) -> str:
    """The values of a tensor, or the first of many."""
    if t.numel() <= _MOST_SHOWN:
        return str(_rounded(t.detach().tolist()))
    some = ", ".join(str(_rounded(x)) for x in t.detach().flatten()[:_MOST_SHOWN].tolist())
    return f"{some}, … ({t.numel()} in all)"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, complex):
        return complex(_rounded(value.real), _rounded(value.imag))
    return float(f"{value:.6g}") if isinstance(value, float) else value
