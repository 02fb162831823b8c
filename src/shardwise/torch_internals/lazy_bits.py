"""The lazy conjugate and negative bits of tensors.

Inside `__torch_dispatch__` torch no longer resolves these bits: it assumes that they have been resolved above. But an op on
local tensors may be a composite that conjugates on the way, and would then read values that are not conjugated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_lazy_zero", "negated_view", "resolving_lazy_bits"]

_KEYS = ("Conjugate", "Negative")
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


def is_lazy_zero(x: torch.Tensor) -> bool:
    """Whether a tensor consists of zeros for which there is no memory, as forward-mode autograd creates them.

    >>> is_lazy_zero(torch.zeros(2)), is_lazy_zero(torch._efficientzerotensor(2))
    (False, True)
    """
    return x._is_zerotensor()


def negated_view(x: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in which the signs of all elements count as changed.

    >>> negated_view(torch.ones(2))
    tensor([-1., -1.])
    """
    return torch._neg_view(x)


def resolving_lazy_bits(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """The same function of arguments, run so that torch resolves conjugate and negative bits.

    >>> resolving_lazy_bits(lambda args, kwargs: args[0].conj().resolve_conj())((torch.tensor([1j]),), {})
    tensor([0.-1.j])
    """

    def resolving(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        excluded = [key for key in _KEYS if _is_excluded(key)]
        for key in excluded:
            _set_excluded(key, False)
        try:
            return run(args, kwargs)
        finally:
            for key in excluded:
                _set_excluded(key, True)

    return resolving
