"""Rules: which dims of an op's tensors may be split and which pending reductions pass through, for any mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from shardwise.layout import Placement
from shardwise.rules.call import Call, Local
from shardwise.rules.letters import Letters

__all__ = ["Candidate", "Creates", "Letters", "Listed", "Listing", "Place", "Row", "Rule"]

Creates = Literal["", "memory", "values"]
"""What an op creates without reading values: nothing, memory that is written later, or values."""


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Place:
    """A rank's part of a call: the shapes of its blocks, the global offsets of its inputs, and the letters that are split."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    sharded: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """A row applied to a call: a letter for each dim of each tensor, None for a dim that must not be split.

    An axis that splits a letter splits it in every tensor; where dims of several sizes share it, each rank has
    the same share of all of them.

    - `reduced`: how partial values are reduced if a letter is split that an output lacks; that output is then pending.
    - `linear`: groups of inputs; a pending sum passes through if all inputs of a group are pending.
    - `monotone`: what a pending reduction of the only tensor becomes, as in {"max": "min"}.
    - `jointly`: reductions that pass, as they are, if they are pending in all inputs.
    - `singly`: reductions that pass, as they are, if one input has them and the others have none.
    - `addends`: inputs that are added to the reduced value, and so must be partial values where it is one.
    - `local`: the program that a rank runs in place of the op, or None for the op itself.
    - `ranges`: letters that are split only so that each rank has a contiguous range, because `local` counts from its offset.
    - `empty`: whether the op accepts blocks without elements, which an uneven split may leave.
    - `alike`: outputs that are the same on all ranks, whatever is split.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    monotone: Mapping[str, str] = field(default_factory=dict)
    jointly: frozenset[str] = frozenset()
    singly: frozenset[str] = frozenset()
    addends: frozenset[int] = frozenset()
    local: Callable[[Call, Place], Local | None] | None = None
    ranges: frozenset[str] = frozenset()
    empty: bool = True
    alike: frozenset[int] = frozenset()

    def cast(self, call: Call) -> Rule:
        """The rule for a call's dtypes: a pending sum passes only if casting the terms and casting their sum agree.

        Integer sums wrap around and sums of bools are "or", so neither survives a cast to another dtype. Complex
        numbers have no max or min.
        """
        if not call.output_dtypes or not (self.linear or self.monotone or self.jointly or self.singly):
            return self
        outputs = [d for i, d in enumerate(call.output_dtypes) if i not in self.alike]
        to_floats = all(_is_float(d) for d in outputs)

        def passes(i: int) -> bool:
            dtype = call.dtypes[i]
            return to_floats if _is_float(dtype) else all(d == dtype for d in outputs)

        ordered = not any(d.startswith("complex") for d in outputs)
        monotone = {a: b for a, b in self.monotone.items() if ordered and (a != "product" or passes(0))}
        one_dtype = ordered and len({*call.dtypes, *outputs}) == 1
        jointly, singly = (x if one_dtype else frozenset() for x in (self.jointly, self.singly))
        linear = tuple(g for g in self.linear if all(map(passes, g)))
        return replace(self, linear=linear, monotone=monotone, jointly=jointly, singly=singly)

    def writing(self, slots: Sequence[int]) -> Rule:
        """The rule of an op that writes to some of its inputs, whose layouts must not change.

        A letter that such an input lacks must not be split, and a pending sum of other inputs must not pass: either
        would leave partial values in it.
        """
        if not slots:
            return self
        common = set.intersection(*({x for x in self.inputs[i] if x is not None} for i in slots))

        def restrict(letters: Letters) -> Letters:
            return tuple(x if x in common else None for x in letters)

        return replace(
            self,
            inputs=tuple(map(restrict, self.inputs)),
            outputs=tuple(map(restrict, self.outputs)),
            linear=tuple(g for g in self.linear if g.issuperset(slots)),
            monotone={a: b for a, b in self.monotone.items() if a == b},
            singly=frozenset(),
        )


class Candidate(NamedTuple):
    """Placements of an op's inputs on one mesh axis, and those of its outputs that follow."""

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Listed:
    """A rule as a list of candidates for one mesh axis; each axis may take any of them."""

    candidates: tuple[Candidate, ...]
    empty: bool = False  # a list of placements is written with non-empty blocks in mind


@dataclass(frozen=True)
class Row:
    """One op's entry in the table: its text, and the function that builds its rule for a call.

    If `reads` is False the rule does not depend on the values of numbers, and the cache key has only their types. If
    `makes` is given the op creates a tensor without reading the values of its input, and gives it the input's layout if
    the shapes are equal: "memory" with its pending reductions, "values" without them, because each rank writes them.
    """

    text: str
    build: Callable[[Call], Rule | None]
    reads: bool = True
    makes: Callable[[Call], Creates] | None = None


@dataclass(frozen=True)
class Listing:
    """One op's entry as a function from its arguments, with a spec for each tensor, to pairs of placements."""

    text: str
    candidates: Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]
    reads: bool = True
