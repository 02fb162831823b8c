"""Flags by which a tensor stands for its conjugate or its negative, and ops that must heed them.

Inside `__torch_dispatch__` torch does not look at them any more: they have been seen to, as it thinks. But an op on the
blocks may be made of others, and conjugate on the way; what it then reads would be wrong without a word.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch.fast_path import Run

__all__ = ["heeding"]

_KEYS = ("Conjugate", "Negative")
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


def heeding(go: Run) -> Run:
    """The same, with flags heeded."""

    def heeded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        off = [key for key in _KEYS if _excluded(key)]
        for key in off:
            _exclude(key, False)
        try:
            return go(args, kwargs)
        finally:
            for key in off:
                _exclude(key, True)

    return heeded
