"""Counting the bytes that collectives send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from shardwise.torch_internals.process_groups import ranks_are_threads

__all__ = ["Ledger", "Sent", "counting", "is_counting", "record"]


@dataclass(frozen=True)
class Sent:
    """One collective.

    `step` is the name of the plan's step, `called` the collective that ran it. `bytes` left this rank; in a simulation,
    they are the sum over all ranks. `grouped` if it moved the blocks of many tensors at once.
    """

    step: str
    called: str
    axes: tuple[str, ...]
    group_size: int
    bytes: Fraction
    grouped: bool = False


@dataclass(eq=False)  # two ledgers that are open at once may have equal entries
class Ledger:
    """The collectives that ran while the ledger was open."""

    entries: list[Sent] = field(default_factory=list)
    observer: Callable[[Sent], None] | None = None
    """Called with each entry."""
    thread: int | None = None
    """The thread whose collectives are counted, where each rank is a thread; else those of all threads."""

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return len(self.entries)

    @property
    def bytes(self) -> Fraction:
        """The bytes of all collectives."""
        return sum((e.bytes for e in self.entries), Fraction(0))


_open: list[Ledger] = []


@contextmanager
def counting(observer: Callable[[Sent], None] | None = None) -> Iterator[Ledger]:
    """Count the collectives inside the block, and their bytes; `observer` is called with each entry.

    >>> with counting() as ledger:
    ...     pass
    >>> ledger.collectives
    0
    """
    ledger = Ledger(observer=observer, thread=threading.get_ident() if ranks_are_threads() else None)
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


def is_counting() -> bool:
    """Whether a ledger is open."""
    return bool(_open)


def record(entry: Sent) -> None:
    """Add an entry to each open ledger of this rank."""
    for ledger in _open:
        if ledger.thread is not None and ledger.thread != threading.get_ident():
            continue
        ledger.entries.append(entry)
        if ledger.observer is not None:
            ledger.observer(entry)
