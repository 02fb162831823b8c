"""What `sanitize` knows of the blocks of tensors: what wrote them, and fingerprints of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.debug.call_facts import CallFacts
from shardwise.faults.source_line import Place, line_of_place
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "Mark",
    "Origin",
    "any_unset",
    "describe_origin",
    "mark_of",
    "mark_result",
    "mark_written",
]

_MARK = "_shardwise_fingerprint"
Origin = tuple[CallFacts, Place]
"""What wrote a block: the op, and the place in the program that called it."""
_unset: set[bool] = set()  # not empty once there has been a block without values


class Mark:
    """What is known of a block that an op has read, or written to.

    Attributes:
        version: of the block.
        value: the fingerprint of that version if it was needed. It is 0 if the values depend on memory that nothing was written to, as
            where torch traces with `torch.empty`: they may differ, as long as the program does not use them.
        origin: what wrote it, if that is known.
        is_changed: whether it was written to afterwards, otherwise than by ops on DTensors.
        listed: the step in which it was last written to in place.
    """

    __slots__ = ("is_changed", "listed", "origin", "value", "version")

    def __init__(self, version: int, origin: Origin | None) -> None:
        self.version, self.origin, self.is_changed = version, origin, False
        self.value: Any = None
        self.listed = -1


def _version(block: Tensor) -> int:
    return -1 if block.is_inference() else block._version


def mark_result(block: Tensor, facts: CallFacts, place: Place, is_unset: bool) -> None:
    """Remember which op computed a block; its fingerprint is computed when an op reads it."""
    if is_unset:
        _unset.add(True)
        mark = Mark(_version(block), (facts, place))
        mark.value = 0
        setattr(block, _MARK, mark)
    else:  # most results are read once or never, so that a mark is made when they are
        setattr(block, _MARK, (_version(block), facts, place))


def mark_written(block: Tensor, origin: Origin, step: int, is_unset: bool) -> bool:
    """Remember which op wrote to a block in place; true the first time in a step."""
    known = getattr(block, _MARK, None)
    if type(known) is Mark:
        mark = known
        mark.version, mark.origin, mark.is_changed = _version(block), origin, False
    else:
        mark = Mark(_version(block), origin)
        setattr(block, _MARK, mark)
    if is_unset:
        _unset.add(True)
    mark.value = 0 if is_unset else None
    is_first = mark.listed != step
    mark.listed = step
    return is_first


def mark_of(block: Tensor) -> Mark:
    """The mark of a block; one that was written to otherwise than by ops on DTensors has no fingerprint yet."""
    known = getattr(block, _MARK, None)
    now = _version(block)
    if type(known) is Mark:
        mark = known
    else:
        mark = Mark(now, None) if known is None else Mark(known[0], known[1:])
        setattr(block, _MARK, mark)
    if mark.version != now or now < 0:
        mark.version, mark.value, mark.is_changed = now, None, True
    return mark


def any_unset(tensors: Sequence[Tensor]) -> bool:
    """Whether the values of a tensor depend on memory that nothing was written to."""
    if not _unset:
        return False
    for t in tensors:
        if isinstance(t, DTensor):
            known = getattr(t._local_tensor, _MARK, None)
            if type(known) is Mark and type(known.value) is int and known.value == 0:
                return True
    return False


def describe_origin(origin: Origin | None, is_changed: bool) -> str:
    """What wrote a block, for people."""
    if origin is None:
        return ""
    facts, place = origin
    file, line, name = line_of_place(place)
    start = "written to after" if is_changed else "the result of"
    return f"{start} {facts.text} at {file}:{line} in {name}"
