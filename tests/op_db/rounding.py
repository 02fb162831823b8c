"""Equality up to rounding: the tolerance of the dtype, and beyond that the measured effect of rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.torch_internals.lazy_bits import resolving_lazy_bits

__all__ = ["differs", "same_up_to_rounding", "widened"]

_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_TRIALS = 3
_ROUNDINGS = 4  # the number of such errors that a result may have: sums are added in another order
_MORE = 40  # trials if three are not enough: few of them cross a kink


def differs(got: Any, want: Any, values: bool = True) -> str:
    """The difference beyond torch's tolerance of the dtype, as text; empty if there is none."""
    if not isinstance(want, Tensor):
        alike = not values or got == want or (got != got and want != want)
        return "" if alike else f"{got!r} not {want!r}"
    if not isinstance(got, Tensor):
        return f"{got!r}, not a tensor"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} not {want.dtype}"
    if got.layout != want.layout:
        return f"layout {got.layout} not {want.layout}"
    if want.layout is not torch.strided and (why := _sparse_difference(got, want)):
        return why
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


def _sparse_difference(got: Tensor, want: Tensor) -> str:
    """The difference in the structure of two sparse tensors of one layout; empty if there is none."""
    for what in ("sparse_dim", "dense_dim", "_nnz"):
        if getattr(got, what)() != getattr(want, what)():
            return f"{what} {getattr(got, what)()} not {getattr(want, what)()}"
    if want.layout is torch.sparse_coo:
        alike = got.is_coalesced() == want.is_coalesced()
        return "" if alike else f"is_coalesced {got.is_coalesced()} not {want.is_coalesced()}"
    shape = tuple(want.values().shape)
    return "" if tuple(got.values().shape) == shape else f"values {tuple(got.values().shape)} not {shape}"


def same_up_to_rounding(run: Callable[..., Any], mine: Any, dense: Any, draws: bool = False) -> bool:
    """Whether results are as close to the true ones as rounding allows.

    The true result is the dense one in a wide dtype. The allowed distance is measured in trials: in the wide dtype, with the
    inputs and the result of each inner op changed by one unit in the last place, up or down. If that is not enough, each
    element may be as far off as in any of more trials: an error that crosses a kink is no multiple of the others. An op that
    draws random numbers (`draws`) has other ones in a wide dtype; its trials use the given dtype, and the dense result
    counts as true.
    """
    wide = _copied if draws else widened
    try:
        truth = dense if draws else run(wide)
        trials = [_trial(run, seed, wide) for seed in range(_TRIALS)]
        if _all_close(mine, dense, truth, trials, []):
            return True
        more = [_trial(run, seed, wide) for seed in range(_TRIALS, _MORE)]
    except Exception:
        return False
    return _all_close(mine, dense, truth, trials, more)


def _trial(run: Callable[..., Any], seed: int, wide: Callable[[Tensor], Tensor]) -> Any:
    with _Rounding(seed) as rounding:
        return run(lambda t: rounding.rounded(wide(t), t.dtype))


def _all_close(mine: Any, dense: Any, truth: Any, trials: list[Any], more: list[Any]) -> bool:
    for which in (0, 1):
        for number, (got, want) in enumerate(zip(mine[which], dense[which], strict=True)):
            if want is None or not isinstance(want, Tensor):
                if differs(got, want) and not (want is None and got.abs().max() == 0):
                    return False
                continue
            got = torch.zeros_like(want) if got is None else got
            if not differs(got, want):
                continue
            true = truth[which][number]
            others, rest = ([t[which][number] for t in found] for found in (trials, more))
            if want.layout is not torch.strided:
                got, want, true = got.to_dense(), want.to_dense(), true.to_dense()
                others, rest = [t.to_dense() for t in others], [t.to_dense() for t in rest]
            if not _close(got, want, true, others, rest):
                return False
    return True


def _copied(t: Tensor) -> Tensor:
    return t.detach().clone()


def widened(t: Tensor) -> Tensor:
    """A copy of a tensor in a dtype where rounding does not matter."""
    return t.detach().to(_WIDE.get(t.dtype, t.dtype)).clone()


class _Rounding(TorchDispatchMode):
    """Add a random rounding error to the result of every op, in the last place of the narrowest input dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator, self.unit = torch.Generator().manual_seed(seed), 0.0

    def rounded(self, t: Tensor, narrow: torch.dtype | None = None, given: Sequence[Tensor] = ()) -> Tensor:
        if t.layout is not torch.strided or not (t.dtype.is_floating_point or t.dtype.is_complex):
            return t  # the values of a sparse tensor were rounded before it was made of them
        if narrow is not None:
            self.unit = max(self.unit, torch.finfo(narrow).eps)
        unit = self.unit or torch.finfo(t.dtype).eps  # computed from integers: it rounds in its own dtype
        with no_dispatch():
            signs = torch.randint(0, 2, t.shape, generator=self.generator) * 2 - 1
            for g in given:
                signs *= ~_is_copied(t.abs(), g.abs())
            return t.detach().mul_(1 + unit * signs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = resolving_lazy_bits(lambda args, kwargs: func(*args, **kwargs))(args, kwargs or {})
        if any(a.alias_info is not None for a in func._schema.arguments):
            return out  # a view or an in-place op: the memory is that of an input
        given = [t for t in tree_leaves((args, kwargs)) if _is_strided(t) and t.dtype != torch.bool]
        return tree_map_only(Tensor, lambda t: self.rounded(t, given=given), out)


def _is_strided(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided


def _is_copied(t: Tensor, given: Tensor) -> Tensor:
    """The elements that an op copies from its input, as `abs` and `amax` do: these are not rounded."""
    if t.shape == given.shape:
        return t == given
    return (
        torch.isin(t.contiguous(), given.to(t.dtype).contiguous())
        if t.numel() < given.numel()
        else torch.zeros_like(t, dtype=torch.bool)
    )


def _close(got: Tensor, want: Tensor, true: Any, others: list[Any], rest: list[Any]) -> bool:
    if not (want.dtype.is_floating_point or want.dtype.is_complex) or got.shape != want.shape:
        return False
    if not all(isinstance(t, Tensor) and t.shape == want.shape for t in (true, *others, *rest)):
        return False
    finite = want.isfinite()
    if got.dtype != want.dtype or not torch.equal(finite, got.isfinite()) or not finite.any():
        return False
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return False
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    mine, dense, true, *tried = (t[finite].to(wide) for t in (got, want, true, *others, *rest))
    largest = max((t - true).abs().max() for t in tried[: len(others)])
    allowed = _ROUNDINGS * largest.expand(true.shape)
    for t in tried[len(others) :]:
        allowed = torch.maximum(allowed, (t - true).abs())
    allowed = allowed + 2 * (dense - true).abs().max() + torch.finfo(want.dtype).eps * true.abs()
    return bool(((mine - true).abs() <= allowed).all())
