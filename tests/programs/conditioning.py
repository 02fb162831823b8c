"""Random rounding errors in every op: what they change beyond the tolerance, no implementation can get right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.torch_internals.lazy_bits import resolving_lazy_bits

__all__ = ["Rounding", "SeparateOperands"]

_EXACT = frozenset(
    {"clone", "zeros_like", "ones_like", "full", "arange", "cat", "stack", "flip", "roll", "index"}
)

_SUMS = frozenset(
    {"sum", "mean", "nansum", "mm", "bmm", "addmm", "baddbmm", "dot", "mv", "cumsum", "var_mean", "std_mean"}
)
"""Ops whose terms may cancel: where they give 0, those in another order give a rounding error of the terms."""

_TERMS = frozenset({"add", "sub", "rsub", "addcmul", "addcdiv", "lerp"})
"""Ops that a pending sum passes through: the terms are rounded, which may be larger than their sum."""

_UPDATES = frozenset({"add_", "sub_", "mul_", "div_", "addcdiv_", "addcmul_", "lerp_"})
"""In-place ops that round, as those of optimizers."""


class Rounding(TorchDispatchMode):
    """Change the floating-point results of ops by some units in the last place.

    Args:
        seed: that of the errors.
        term: the magnitude of the terms of pending sums, 0 if there are none.
    """

    def __init__(self, seed: int, term: float = 0.0) -> None:
        super().__init__()
        self.term = term
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = resolving_lazy_bits(lambda args, kwargs: func(*args, **kwargs))(args, kwargs or {})
        name = func.__name__.split(".")[0]
        if name in _EXACT or (name not in _UPDATES and any(a.alias_info for a in func._schema.arguments)):
            return out
        with no_dispatch():  # a transform that traces would trace the rounding, too
            terms = (
                [a for a in args if isinstance(a, Tensor) and a.is_floating_point()] if name in _SUMS else []
            )
            largest = max((float(a.abs().nan_to_num(0).max()) for a in terms if a.numel()), default=0.0)
            term = self.term if name in _TERMS else 0.0
            return tree_map_only(Tensor, lambda t: self._round(t, largest, term), out)

    def _round(self, t: Tensor, largest: float, term: float) -> Tensor:
        if not (t.dtype.is_floating_point or t.dtype.is_complex) or t.layout is not torch.strided:
            return t
        # a derivative that is 0, of a forward-mode transform, has no memory that could be written to
        if t._is_zerotensor() or any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)):
            return t
        unit = 4 * torch.finfo(t.dtype).eps
        signs = torch.randint(-1, 2, t.shape, generator=self.generator)
        errors = unit * signs.to(t.real.dtype if t.dtype.is_complex else t.dtype)
        if math.isfinite(largest) and largest > 0:
            t.add_(torch.where(t.abs() <= unit * largest, errors * largest, 0))
        return t.mul_(1 + errors).add_(errors * term)


class SeparateOperands(TorchDispatchMode):
    """Copy the operands of in-place ops that overlap the tensor that is written to, but are not it.

    What a kernel reads that it has written before depends on its order: a program that this changes is not defined.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info and s.alias_info.is_write
        ]
        targets = [t for a in written for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]

        def separate(t: Tensor) -> Tensor:
            overlapping = [w for w in targets if w is not t and _shares_storage(w, t)]
            return t.clone() if any(_place(w) != _place(t) for w in overlapping) else t

        rest = tree_map_only(Tensor, separate, args[1:]) if targets else args[1:]
        return func(*args[:1], *rest, **(kwargs or {}))


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.layout is b.layout is torch.strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _place(t: Tensor) -> Any:
    return t.storage_offset(), t.shape, t.stride()
