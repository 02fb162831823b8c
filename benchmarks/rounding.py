"""Equal but for rounding: the tolerance of the dtype, and where that fails, what the op makes of rounding its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["differs", "same_up_to_rounding"]

_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_TRIALS = 3
_ROUNDINGS = 4  # how many such errors a result may have: sums are added in another order


def differs(got: Any, want: Any, values: bool = True) -> str:
    """What differs beyond torch's own tolerance of the dtype; empty if nothing."""
    if not isinstance(want, Tensor):
        alike = not values or got == want or (got != got and want != want)
        return "" if alike else f"{got!r} not {want!r}"
    if not isinstance(got, Tensor):
        return f"{got!r} where there is a tensor"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} not {want.dtype}"
    if got.layout != want.layout:
        return f"layout {got.layout} not {want.layout}"
    if not values:
        return ""
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError:
        if want.layout is not torch.strided:
            return f"values {got} not {want}"
        far = (got != want) & ~((got != got) & (want != want))
        at = far.flatten().nonzero().flatten()[:4].tolist()
        return f"values {got.flatten()[at].tolist()} not {want.flatten()[at].tolist()} at {at}"
    return ""


def same_up_to_rounding(run: Callable[..., Any], mine: Any, dense: Any) -> bool:
    """Whether results are as near the true ones as rounding allows.

    The truth is the dense result in a wide dtype. How far from it a right answer may be is tried out: in the wide
    dtype, with the inputs and the result of every op on the way off by one unit in the last place, up or down.
    """
    try:
        truth = run(_widened)
        tries = []
        for seed in range(_TRIALS):
            with _Rounding(seed) as rounding:
                tries.append(run(lambda t, r=rounding: r.rounded(_widened(t), t.dtype)))
    except Exception:
        return False
    for which in (0, 1):
        for number, (got, want) in enumerate(zip(mine[which], dense[which], strict=True)):
            if want is None or not isinstance(want, Tensor):
                if differs(got, want) and not (want is None and got.abs().max() == 0):
                    return False
                continue
            got = torch.zeros_like(want) if got is None else got
            others = [t[which][number] for t in tries]
            if differs(got, want) and not _near(got, want, truth[which][number], others):
                return False
    return True


def _widened(t: Tensor) -> Tensor:
    return t.detach().to(_WIDE.get(t.dtype, t.dtype)).clone()


class _Rounding(TorchDispatchMode):
    """Every op rounds at random, to the last place of the narrowest dtype that went in."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.made, self.unit = torch.Generator().manual_seed(seed), 0.0

    def rounded(self, t: Tensor, narrow: torch.dtype | None = None) -> Tensor:
        if not (t.dtype.is_floating_point or t.dtype.is_complex):
            return t
        if narrow is not None:
            self.unit = max(self.unit, torch.finfo(narrow).eps)
        unit = self.unit or torch.finfo(t.dtype).eps  # made of integers: it rounds in its own dtype
        with no_dispatch():
            signs = torch.randint(0, 2, t.shape, generator=self.made) * 2 - 1
            return t.detach().mul_(1 + unit * signs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(a.alias_info is not None for a in func._schema.arguments):
            return out  # a view, or written in place: the same memory
        return tree_map_only(Tensor, self.rounded, out)


def _near(got: Tensor, want: Tensor, true: Any, others: list[Any]) -> bool:
    if not (want.dtype.is_floating_point or want.dtype.is_complex) or got.shape != want.shape:
        return False
    if not all(isinstance(t, Tensor) and t.shape == want.shape for t in (true, *others)):
        return False
    finite = want.isfinite()
    if got.dtype != want.dtype or not torch.equal(finite, got.isfinite()) or not finite.any():
        return False
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return False
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    mine, dense, true, *tried = (t[finite].to(wide) for t in (got, want, true, *others))
    swing = max((t - true).abs().max() for t in tried)
    allowed = _ROUNDINGS * swing + 2 * (dense - true).abs().max() + torch.finfo(want.dtype).eps * true.abs()
    return bool(((mine - true).abs() <= allowed).all())
