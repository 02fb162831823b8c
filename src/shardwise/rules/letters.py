"""Letters: names for the dims of a rule's tensors. Dims with the same letter are split together; None is never split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwise.rules.call import Call, Slot

__all__ = [
    "Letters",
    "broadcast_letters",
    "dim_letters",
    "letter_sizes",
    "letters_by_name",
    "unsplit",
    "without_broadcast",
]

Letters = tuple[str | None, ...]


def dim_letters(ndim: int, *fixed: int) -> Letters:
    """The letters d0, d1, … of a tensor's dims, with None for the dims that must not be split.

    >>> dim_letters(3, 1)
    ('d0', None, 'd2')
    """
    return tuple(None if i in fixed else f"d{i}" for i in range(ndim))


def unsplit(shapes: Iterable[Sequence[int]]) -> tuple[Letters, ...]:
    """The letters of tensors no dim of which may be split."""
    return tuple((None,) * len(shape) for shape in shapes)


def letter_sizes(letters: Sequence[Letters], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each letter; dims of size 1 count only if there is no larger one, because they broadcast."""
    out: dict[str, int] = {}
    for one, shape in zip(letters, shapes, strict=True):
        for x, n in zip(one, shape, strict=True):
            if x is not None:
                out[x] = n if out.get(x, 1) == 1 else out[x]
    return out


def without_broadcast(letters: Letters, shape: Sequence[int], sizes: Mapping[str, int]) -> Letters:
    """Drop the letters of broadcast dims, which have size 1 where other tensors have the letter's size."""
    return tuple([None if x is None or n != sizes[x] else x for x, n in zip(letters, shape, strict=True)])


def broadcast_letters(shapes: Sequence[Sequence[int]], prefix: str = "d") -> list[Letters]:
    """The letters of tensors that broadcast against each other.

    >>> broadcast_letters([(3, 1), (4,)])
    [('d0', None), ('d1',)]
    """
    ndim = max(map(len, shapes), default=0)
    every: Letters = tuple([f"{prefix}{i}" for i in range(ndim)])
    letters = [every[ndim - len(s) :] for s in shapes]
    sizes = letter_sizes(letters, shapes)
    return [without_broadcast(x, s, sizes) for x, s in zip(letters, shapes, strict=True)]


def letters_by_name(call: Call, letters: Mapping[str, Letters]) -> tuple[Letters, ...]:
    """The letters of each tensor of a call, given by argument name; other tensors must not be split."""
    out = list(unsplit(call.shapes))
    for name, one in letters.items():
        value = call.args.get(name)
        if isinstance(value, Slot) and len(one) == len(call.shapes[value.number]):
            out[value.number] = one
    return tuple(out)
