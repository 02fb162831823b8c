"""What of torch's op_db is not compared with the dense result by value, and why."""

from __future__ import annotations

from typing import Any

__all__ = ["FILLED", "excluded"]

_UNSET = "its values are whatever the memory held: shape and dtype are compared"

# Ops whose values are no function of their inputs. What is drawn at random is one: of the seed.
_NO_FUNCTION: dict[str, str] = dict.fromkeys(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _UNSET
)

# Ops that fill their input with random numbers: a pending one is an error.
FILLED = frozenset({"cauchy", "exponential", "geometric", "log_normal", "uniform", "normal.in_place"})


def excluded(op: Any) -> str:
    """Why the values of an op's results are not compared; empty if they are."""
    return _NO_FUNCTION.get(op.name, "")
