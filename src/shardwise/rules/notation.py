"""The notation of rows: `m k, k n -> m n`.

Per tensor argument of the schema, in order, its dims as letters; then the outputs. `…` stands for any number of
leading dims, the same in all places. `!d` must be whole on each rank, `!` alone is such a dim without a name, and `*`
is a tensor that must be whole altogether. A letter that no output has is summed, or reduced by what the row says.
An argument that a call leaves out is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from shardwise.layout import LayoutError
from shardwise.rules.call import Call, Local
from shardwise.rules.rule import Letters, Place, Row, Rule

__all__ = ["groups_of", "letters", "linear_text", "row", "sizes_of", "without_broadcast"]

Words = tuple[str, ...]


@lru_cache(maxsize=2048)
def _parsed(text: str) -> tuple[tuple[Words, ...], tuple[Words, ...]]:
    before, arrow, after = text.partition("->")
    if not arrow:
        raise LayoutError(
            f"{text!r} is not a rule.", why="it has no ->", fix="write it like 'm k, k n -> m n'"
        )
    return tuple(tuple(s.split()) for s in before.split(",")), tuple(
        tuple(s.split()) for s in after.split(",")
    )


def letters(words: Sequence[str], shape: Sequence[int], whole: set[str]) -> Letters | None:
    """The letters of one tensor, or None if it has another number of dims than the words say."""
    if list(words) == ["*"]:
        return (None,) * len(shape)
    is_open = "…" in words
    fixed = len(words) - is_open
    if len(shape) < fixed or (not is_open and len(shape) != fixed):
        return None
    out: list[str | None] = []
    for word in words:
        if word == "…":
            n = len(shape) - fixed
            out += [f"…{n - i}" for i in range(n)]  # counted from the right, so that they broadcast
        else:
            out.append(None if word.startswith("!") or word in whole else word)
    return tuple(out)


def groups_of(call: Call, linear: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    """Groups of tensor arguments as groups of tensors; one with a number in it is none.

    A number is the same on all ranks, and so not a part of a sum.
    """
    slots = call.slots()
    return tuple(frozenset(s for i in g for s in slots[i]) for g in linear if all(slots[i] for i in g))


def linear_text(linear: Sequence[Sequence[int]]) -> str:
    return "; linear in " + " and in ".join(f"({','.join(map(str, g))})" for g in linear) if linear else ""


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
    """A row from its text; `linear` and `added` name tensor arguments by their place in the schema.

    >>> from shardwise.rules.call import Slot
    >>> rule = row("m k, k n -> m n", linear=[[0], [1]]).build(
    ...     Call("aten.mm", {}, (Slot(0), Slot(1)), ((4, 6), (6, 8)), ((4, 8),)))
    >>> rule.inputs, rule.outputs, dict(rule.reduced)
    ((('m', 'k'), ('k', 'n')), (('m', 'n'),), {'k': 'sum'})
    """
    inputs, outputs = _parsed(text)
    whole = {w[1:] for words in inputs for w in words if w.startswith("!")}

    def build(call: Call) -> Rule | None:
        found: dict[int, Letters] = {}
        for words, here in zip(inputs, call.slots(), strict=False):
            for slot in here:
                said = letters(words, call.shapes[slot], whole)
                if said is None:
                    return None
                found[slot] = said
        ins = [found.get(i, (None,) * len(s)) for i, s in enumerate(call.shapes)]
        want = call.wanted or (True,) * len(outputs)
        # an op that only writes has no outputs, and there is nothing behind the arrow of its row
        made = [words for words, wanted in zip(outputs, want, strict=True) if wanted] if call.outputs else []
        outs = [letters(words, s, whole) for words, s in zip(made, call.outputs, strict=True)]
        if any(o is None for o in outs):
            return None
        gone = [o for o in outs if o is not None]
        sizes = sizes_of([*ins, *gone], [*call.shapes, *call.outputs])
        _check_sizes(text, call, [*ins, *gone], sizes)
        ins = [without_broadcast(said, s, sizes) for said, s in zip(ins, call.shapes, strict=True)]
        used = {x for said in ins for x in said if x is not None}
        return Rule(
            tuple(ins),
            tuple(gone),
            {x: (by or {}).get(x, "sum") for x in used if any(x not in said for said in gone)},
            groups_of(call, linear),
            addends=frozenset(s for i in added for s in call.slots()[i]),
            local=local,
            ranges=frozenset(ranges),
            empty=empty,
        )

    return Row(
        text + "".join(f"; {x} by {op}" for x, op in (by or {}).items()) + linear_text(linear), build, reads
    )


def _check_sizes(text: str, call: Call, said: Sequence[Letters], sizes: Mapping[str, int]) -> None:
    """Raise if a letter stands for dims of different sizes."""
    for one, shape in zip(said, [*call.shapes, *call.outputs], strict=True):
        for x, n in zip(one, shape, strict=True):
            if x is not None and n not in (1, sizes[x]):
                raise LayoutError(
                    f"the row of {call.op}, {text!r}, does not fit {call.shapes} -> {call.outputs}.",
                    why=f"{x} is a dim of size {n} and one of size {sizes[x]}",
                    fix="dims of one letter are the same dim: use a letter for each, or ! for one that is whole",
                )


def without_broadcast(said: Letters, shape: Sequence[int], sizes: Mapping[str, int]) -> Letters:
    """A dim of size 1 that others have larger is not that dim: it is whole on each rank."""
    return tuple(None if x is None or n != sizes[x] else x for x, n in zip(said, shape, strict=True))


def sizes_of(said: Sequence[Letters], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each letter; size 1 counts only if all have it, for it is broadcast."""
    out: dict[str, int] = {}
    for one, shape in zip(said, shapes, strict=True):
        for x, n in zip(one, shape, strict=True):
            if x is not None:
                out[x] = n if out.get(x, 1) == 1 else out[x]
    return out
