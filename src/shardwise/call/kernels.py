"""Wrapping the results of ops on blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shardwise.call.arguments import map_leaves
from shardwise.layout import Spec
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.subclass import new_dtensor

__all__ = ["wrap"]


def wrap(result: Any, specs: Iterator[Spec]) -> Any:
    """The results of an op with each tensor wrapped in the next spec; None and numbers stay."""
    return map_leaves(
        lambda r: new_dtensor(DTensor, r, next(specs), False) if isinstance(r, Tensor) else r, result
    )
