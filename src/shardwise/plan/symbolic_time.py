"""Times that depend on symbolic sizes: sums that are compared for all sizes at once where that is possible."""

from __future__ import annotations

from typing import Any

from shardwise.layout.sizes import known_symbols

__all__ = ["SymbolicTime", "time_of"]


class SymbolicTime:
    """Seconds as a sum of products of symbolic sizes, which are positive.

    Of two such sums one is the smaller for all sizes if no coefficient of their difference has another sign than the others.
    Else the compiler decides for the sizes at hand, and checks at each call that it would decide the same. So compiled code
    sends what eager code sends, for any size and on every rank.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: dict[Any, float]) -> None:
        self.terms = terms

    def _minus(self, other: SymbolicTime | float) -> dict[Any, float]:
        theirs = other.terms if isinstance(other, SymbolicTime) else {1: other}
        return {k: self.terms.get(k, 0.0) - theirs.get(k, 0.0) for k in {**self.terms, **theirs}}

    def _sign(self, other: SymbolicTime | float) -> int:
        difference = self._minus(other)
        if all(c == 0 for c in difference.values()):
            return 0
        if all(c >= 0 for c in difference.values()):
            return 1
        if all(c <= 0 for c in difference.values()):
            return -1
        return known_symbols().sign(difference)

    def __add__(self, other: SymbolicTime | float) -> SymbolicTime:
        theirs = other.terms if isinstance(other, SymbolicTime) else {1: other}
        return SymbolicTime(
            {k: self.terms.get(k, 0.0) + theirs.get(k, 0.0) for k in {**self.terms, **theirs}}
        )

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymbolicTime | float | int) and self._sign(other) == 0

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: SymbolicTime | float) -> bool:
        return self._sign(other) < 0

    def __gt__(self, other: SymbolicTime | float) -> bool:
        return self._sign(other) > 0

    def __le__(self, other: SymbolicTime | float) -> bool:
        return self._sign(other) <= 0

    def __ge__(self, other: SymbolicTime | float) -> bool:
        return self._sign(other) >= 0


def time_of(latency: float, size: Any, pace: float) -> Any:
    """The seconds that a number of bytes takes: `latency + size * pace`, where the size is a symbol."""
    terms = {k: float(c) * pace for k, c in known_symbols().terms(size).items()}
    terms[1] = terms.get(1, 0.0) + latency
    return SymbolicTime(terms)
