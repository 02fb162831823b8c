"""Comparing the losses of a run on many ranks with those of a run on one."""

from __future__ import annotations

__all__ = ["compare_losses"]


def compare_losses(found: list[float], alone: list[float], tolerance: float) -> None:
    """Print the greatest difference of two lists of losses, and exit if it is more than rounding."""
    worst = max(abs(a - b) for a, b in zip(found, alone, strict=True))
    print(f"The losses differ by at most {worst:.1e}.")
    if worst > tolerance:
        raise SystemExit("That is more than rounding.")
