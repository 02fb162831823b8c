"""Rule: what an op allows, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.rules.call import Call, Local

__all__ = ["Letters", "Place", "Row", "Rule"]

Letters = tuple[str | None, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank is in a call: its blocks' shapes, where they begin in the whole, and which letters are split."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    sharded: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """A row that has met a call: a letter for each dim of each tensor, None where a dim must be whole.

    A letter that some axis splits is split wherever it stands; where dims of several sizes have it, only evenly. An
    output that has not got a `reduced` one is pending: each rank has a part of it, and `addends`, inputs that are added
    to it, must be such parts too. `linear` are groups of inputs in which a pending sum passes through, `monotone` says
    what a pending max or min of the only tensor becomes. A letter in `ranges` is split only so that each rank has a
    range of it: its `local` counts from where a block begins.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    monotone: Mapping[str, str] = field(default_factory=dict)
    addends: frozenset[int] = frozenset()
    local: Callable[[Call, Place], Local | None] | None = None
    ranges: frozenset[str] = frozenset()
    empty: bool = True  # whether the op takes a block without elements, as an uneven cut may leave
    alike: frozenset[int] = frozenset()  # outputs that come out the same on all ranks, whatever is split


@dataclass(frozen=True)
class Row:
    """One op's entry in the table: its text, how it meets a call, and whether it reads numbers.

    A row that does not read numbers keeps them out of the cache's key, all but their types. `makes` says that the op
    reads no values either: it makes a tensor like the one it is given, which lies as that one does if its shape is
    the same.
    """

    text: str
    build: Callable[[Call], Rule | None]
    reads: bool = True
    makes: bool = False
