"""Random rounding errors in every op: what they change beyond the tolerance, no implementation can get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.torch_internals.lazy_bits import resolving_lazy_bits

__all__ = ["Rounding"]

_EXACT = frozenset(
    {"clone", "zeros_like", "ones_like", "full", "arange", "cat", "stack", "flip", "roll", "index"}
)


class Rounding(TorchDispatchMode):
    """Change the floating-point results of ops by some units in the last place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = resolving_lazy_bits(lambda args, kwargs: func(*args, **kwargs))(args, kwargs or {})
        if (
            any(a.alias_info is not None for a in func._schema.arguments)
            or func.__name__.split(".")[0] in _EXACT
        ):
            return out
        return tree_map_only(Tensor, self._round, out)

    def _round(self, t: Tensor) -> Tensor:
        if not (t.dtype.is_floating_point or t.dtype.is_complex) or t.layout is not torch.strided:
            return t
        if (
            t._is_zerotensor()
        ):  # a derivative that is 0, of a forward-mode transform: it has no memory that could be written to
            return t
        unit = 4 * torch.finfo(t.dtype).eps
        signs = torch.randint(-1, 2, t.shape, generator=self.generator)
        return t.mul_(1 + unit * signs.to(t.real.dtype if t.dtype.is_complex else t.dtype))
