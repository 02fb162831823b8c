"""Counting what was sent, where it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

__all__ = ["Ledger", "Sent", "counting", "is_counting", "record"]


@dataclass(frozen=True)
class Sent:
    """One collective: what it is for, what was called to do it, over what axes, and the bytes that left ranks.

    In a simulation the bytes are those of all ranks together, on real processes those of this one.
    """

    step: str
    called: str
    axes: tuple[str, ...]
    group_size: int
    bytes: Fraction


@dataclass(eq=False)
class Ledger:
    """What was sent while it was open."""

    entries: list[Sent] = field(default_factory=list)

    @property
    def collectives(self) -> int:
        return len(self.entries)

    @property
    def bytes(self) -> Fraction:
        return sum((e.bytes for e in self.entries), Fraction(0))


_open: list[Ledger] = []


@contextmanager
def counting() -> Iterator[Ledger]:
    """Count what is sent inside the block.

    >>> with counting() as ledger:
    ...     pass
    >>> ledger.collectives
    0
    """
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


def is_counting() -> bool:
    return bool(_open)


def record(entry: Sent) -> None:
    """Write an entry into each open ledger."""
    for ledger in _open:
        ledger.entries.append(entry)
