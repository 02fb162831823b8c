"""The ops of torch's op_db whose values are not compared with the dense result, and why."""

from __future__ import annotations

from typing import Any

__all__ = ["FILLED", "excluded"]

_UNINITIALIZED = "its memory is uninitialized: only shape and dtype are compared"

# Random ops are not among them: their values are a function of the seed.
_NOT_COMPARED: dict[str, str] = dict.fromkeys(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    _UNINITIALIZED,
)

# Ops that fill their input with random numbers, which is an error if the input has a pending reduction.
FILLED = frozenset({"cauchy", "exponential", "geometric", "log_normal", "uniform", "normal.in_place"})


def excluded(op: Any) -> str:
    """Why the values of an op's results are not compared; empty if they are."""
    return _NOT_COMPARED.get(op.name, "")
