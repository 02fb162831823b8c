"""Telling other ranks of an error that an op raised on this one, should they wait for it."""

from __future__ import annotations

from typing import Any

from shardwise.call.arguments import tensors_in
from shardwise.faults import note_error
from shardwise.tensor.dtensor import DTensor

__all__ = ["note_failure"]


def note_failure(error: Exception, func: Any, args: tuple[Any, ...]) -> None:
    """Note the op and the layouts of its operands; kernels check values, which other ranks may not have."""
    specs = [t._spec for t in tensors_in(args) if isinstance(t, DTensor)]
    note_error(error, lambda: f"{func} of {', '.join(map(str, specs))}")
