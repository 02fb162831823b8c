"""Rule: what an op allows, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardwise.layout import Placement
from shardwise.rules.call import Call, Local

__all__ = ["Candidate", "Letters", "Listed", "Listing", "Place", "Row", "Rule"]

Letters = tuple[str | None, ...]


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


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

    def cast(self, call: Call) -> Rule:
        """The rule for a call's dtypes: a pending sum passes only where a sum of casts is the cast of the sum.

        Parts of integers wrap around and add up to what wraps around with them, truth values add up by "or", and
        neither holds in another dtype. Complex numbers have no order.
        """
        if not call.made or not (self.linear or self.monotone):
            return self
        made = [
            d for i, d in enumerate(call.made) if i not in self.alike
        ]  # those are no function of the parts
        of_kind = all(_is_float(d) for d in made)

        def passes(i: int) -> bool:
            here = call.dtypes[i]
            return of_kind if _is_float(here) else all(d == here for d in made)

        ordered = not any(d.startswith("complex") for d in made)
        kept = {a: b for a, b in self.monotone.items() if ordered and (a != "product" or passes(0))}
        return replace(self, linear=tuple(g for g in self.linear if all(map(passes, g))), monotone=kept)

    def writing(self, slots: Sequence[int]) -> Rule:
        """The rule of an op that writes to some of its inputs: they stay as they lie, so that what they lack is whole.

        A letter that such an input has not got would leave a part of the result in it, and so would a pending sum
        of others.
        """
        if not slots:
            return self
        kept = set.intersection(*({x for x in self.inputs[i] if x is not None} for i in slots))

        def some(said: Letters) -> Letters:
            return tuple(x if x in kept else None for x in said)

        return replace(
            self,
            inputs=tuple(map(some, self.inputs)),
            outputs=tuple(map(some, self.outputs)),
            linear=tuple(g for g in self.linear if g.issuperset(slots)),
            monotone={a: b for a, b in self.monotone.items() if a == b},
        )


class Candidate(NamedTuple):
    """What each output of an op then is on one axis of a mesh, if each input is so."""

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Listed:
    """A rule as the list of all that one axis may do; several axes combine freely."""

    candidates: tuple[Candidate, ...]
    empty: bool = False  # who lists placements thinks of blocks with elements


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


@dataclass(frozen=True)
class Listing:
    """One op's entry as a function: from its arguments, with what is known of each tensor in its place, to candidates."""

    text: str
    candidates: Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]
    reads: bool = True
