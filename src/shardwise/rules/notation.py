"""The notation of rows: `m k, k n -> m n`.

The dims of each tensor argument of the schema, in order, as letters; then those of the outputs. `…` is any number of
leading dims, the same everywhere. `!d` must not be split, `!` is such a dim without a name, and `*` is a tensor that
must be replicated. A letter that an output lacks is summed, or reduced as the row specifies. Arguments that a call
leaves out are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import compress

from shardwise.layout import LayoutError
from shardwise.rules.call import Call, Local
from shardwise.rules.letters import Letters, letter_sizes, unsplit, without_broadcast
from shardwise.rules.rule import Place, Row, Rule

__all__ = ["ANY_REDUCTION", "groups_of", "linear_text", "op_names", "row"]

ANY_REDUCTION: Mapping[str, str] = {"max": "max", "min": "min", "product": "product"}
"""`Rule.monotone` of an op that only copies elements: with `linear`, any pending reduction passes."""

_Words = tuple[str, ...]


@lru_cache(maxsize=2048)
def _parse(text: str) -> tuple[tuple[_Words, ...], tuple[_Words, ...]]:
    before, arrow, after = text.partition("->")
    if not arrow:
        raise LayoutError(
            f"{text!r} is not a rule.", why="It has no ->.", fix="Write it like 'm k, k n -> m n'."
        )
    inputs, outputs = (tuple(tuple(s.split()) for s in side.split(",")) for side in (before, after))
    return inputs, outputs


def _letters(words: Sequence[str], shape: Sequence[int], fixed: set[str]) -> Letters | None:
    """The letters of one tensor, or None if it does not have the number of dims that the words state."""
    if list(words) == ["*"]:
        return (None,) * len(shape)
    is_open = "…" in words
    count = len(words) - is_open
    if len(shape) < count or (not is_open and len(shape) != count):
        return None
    out: list[str | None] = []
    for word in words:
        if word == "…":
            n = len(shape) - count
            out += [f"…{n - i}" for i in range(n)]  # counted from the right, so that they broadcast
        else:
            out.append(None if word.startswith("!") or word in fixed else word)
    return tuple(out)


def groups_of(call: Call, linear: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    """Groups of tensor arguments as groups of slots, without those in which a number replaces a tensor.

    A number is the same on all ranks, so it is not a term of a pending sum.
    """
    slots = call.slots()
    return tuple(frozenset(s for i in g for s in slots[i]) for g in linear if all(slots[i] for i in g))


def linear_text(linear: Sequence[Sequence[int]]) -> str:
    """The text of a row's `linear`."""
    return "; linear in " + " and in ".join(f"({','.join(map(str, g))})" for g in linear) if linear else ""


def op_names(text: str) -> list[str]:
    """The full names of aten ops, whose overload is `default` unless given.

    >>> op_names("mm add.Tensor")
    ['aten.mm.default', 'aten.add.Tensor']
    """
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split()]


def row(
    text: str,
    *,
    by: Mapping[str, str] | None = None,
    linear: Sequence[Sequence[int]] = (),
    reads: bool = True,
    added: Sequence[int] = (),
    empty: bool = True,
    ranges: Sequence[str] = (),
    local: Callable[[Call, Place], Local | None] | None = None,
) -> Row:
    """Parse a row.

    `by` has the reductions other than a sum, by letter. `linear` and `added` are indices of tensor arguments; the other
    arguments are those of `Row` and `Rule`. Building raises `LayoutError` if the row contradicts the shapes of a call.

    >>> from shardwise.rules.call import Slot
    >>> rule = row("m k, k n -> m n", linear=[[0], [1]]).build(
    ...     Call("aten.mm", {}, (Slot(0), Slot(1)), ((4, 6), (6, 8)), ((4, 8),)))
    >>> rule.inputs, rule.outputs, dict(rule.reduced)
    ((('m', 'k'), ('k', 'n')), (('m', 'n'),), {'k': 'sum'})
    """
    inputs, outputs = _parse(text)
    fixed = {w[1:] for words in inputs for w in words if w.startswith("!")}
    ops = by or {}

    def build(call: Call) -> Rule | None:
        # the row of an op that returns nothing has nothing after the arrow
        computed = list(compress(outputs, call.wanted or (True,) * len(outputs))) if call.outputs else []
        if len(computed) != len(call.outputs):
            why = f"The row has {len(computed)} of the call's {len(call.outputs)} outputs."
            raise _misfit(text, call, why, "Write the dims of each output after the arrow.")
        shapes, slots = [*call.shapes, *call.outputs], call.slots()
        pairs = [(words, slot) for words, here in zip(inputs, slots, strict=False) for slot in here]
        every = list(unsplit(shapes))
        for words, i in [*pairs, *zip(computed, range(len(call.shapes), len(shapes)), strict=True)]:
            letters = _letters(words, shapes[i], fixed)
            if letters is None:
                return None
            every[i] = letters
        sizes = letter_sizes(every, shapes)
        _check_sizes(text, call, every, sizes)
        ins = [without_broadcast(x, s, sizes) for x, s in zip(every, call.shapes, strict=False)]
        outs = every[len(ins) :]
        used = {x for one in ins for x in one if x is not None}
        return Rule(
            tuple(ins),
            tuple(outs),
            {x: ops.get(x, "sum") for x in used if any(x not in one for one in outs)},
            groups_of(call, linear),
            addends=frozenset(s for i in added for s in slots[i]),
            local=local,
            ranges=frozenset(ranges),
            empty=empty,
        )

    return Row(text + "".join(f"; {x} by {op}" for x, op in ops.items()) + linear_text(linear), build, reads)


def _check_sizes(text: str, call: Call, letters: Sequence[Letters], sizes: Mapping[str, int]) -> None:
    """Raise if dims of different sizes have the same letter."""
    for one, shape in zip(letters, [*call.shapes, *call.outputs], strict=True):
        for x, n in zip(one, shape, strict=True):
            if x is not None and n not in (1, sizes[x]):
                why = f"{x} is a dim of size {n} and one of size {sizes[x]}."
                raise _misfit(
                    text, call, why, "Use one letter per size, or ! for a dim that must not be split."
                )


def _misfit(text: str, call: Call, why: str, fix: str) -> LayoutError:
    what = f"The row of {call.op}, {text!r}, does not fit {call.shapes} -> {call.outputs}."
    return LayoutError(what, why=why, fix=fix)
