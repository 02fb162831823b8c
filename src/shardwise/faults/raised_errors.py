"""Errors that this rank raised: their texts, and whether the program is busy with one of them or has caught it."""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Iterator

from shardwise.faults.error import PeerError
from shardwise.faults.record import HANDLES, OwnRecord
from shardwise.faults.source_line import line_of_error

__all__ = ["RaisedErrors"]


class RaisedErrors:
    """The errors of this rank, which its record shows to the others in case they wait for it in vain.

    Attributes:
        texts: of the last ones.
    """

    def __init__(self, record: OwnRecord) -> None:
        self._record = record
        self.texts: deque[str] = deque(maxlen=64)
        self._last: tuple[int, str] | None = None  # its id and its text
        self._began_with = 0  # the id of the error that was being handled when a collective began

    def note(self, error: BaseException, text: str | None = None) -> None:
        """Record an error.

        Args:
            error: the error.
            text: what it is about, with the op that raised it; by default what was given for the same error before, or the line.
        """
        if text is None:
            known = self._last
            text = known[1] if known is not None and known[0] == id(error) else _describe(error)
        self._last = (id(error), text)
        self.texts.append(text)
        self._record.post_error(text)
        self._record.words[HANDLES] = 1

    def begin_with(self, error: BaseException) -> None:
        """Record that a collective is about to begin in an `except` or `finally` block: if other ranks call another one, the error is why."""
        # libraries have handlers, too: the innermost error that the program's own lines raised
        own = next((link for link in _chain(error) if line_of_error(link.__traceback__)[0]), None)
        if own is not None and not isinstance(own, PeerError):
            text = None if id(own) == self._began_with else _describe(own)
            self._began_with = id(own)
            self._record.post_handled(text)

    def look(self, handled: BaseException | None) -> None:
        """Record whether the program is busy with the last error, or has ended by it; else it has caught it and goes on.

        Args:
            handled: the error that the program is handling.
        """
        if self._last is not None and self._record.words[HANDLES]:
            ids = {id(link) for top in (handled, getattr(sys, "last_value", None)) for link in _chain(top)}
            self._record.words[HANDLES] = int(self._last[0] in ids)


def _describe(error: BaseException) -> str:
    """An error of the user's program: its source line and message."""
    file, line, name = line_of_error(error.__traceback__)
    what = "".join(traceback.format_exception_only(error)).strip()
    return f"{file}:{line} in {name}\n  {what}"


def _chain(error: object) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    seen: set[int] = set()
    left = [error]
    while left:
        link = left.pop()
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            left += [link.__cause__, link.__context__]
