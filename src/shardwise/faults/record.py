"""What a rank is doing, in a file that other processes of the machine can read, also after the rank has died.

The file holds words of 64 bits (the state, and for each process group how many collectives have begun and the signatures of the
last ones), the notes of the last collectives, and the last error.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from typing import NamedTuple

from shardwise.faults.processes import process_state, start_time

__all__ = [
    "ENDED",
    "ERRORS",
    "ERROR_AT",
    "GUARDED",
    "GUARDS",
    "HANDLED_AT",
    "HANDLES",
    "LEFT",
    "RAISED",
    "STATE",
    "STILL",
    "STUCK",
    "TOTAL",
    "UNGUARDED",
    "WAIT",
    "Entry",
    "OwnRecord",
    "Record",
    "Row",
    "signature_at",
]

UNGUARDED, GUARDED, LEFT, RAISED, ENDED = range(5)
"""States: outside of any guard, inside one, has left it, has left it by an error, has left the world."""

PID, START, TOTAL, WAIT, STATE, GUARDS, ERRORS, ERROR_AT, ROWS, STUCK, STILL, HANDLES, HANDLED_AT = range(13)
_HEADER = 16
_ROW_WORDS, _MAX_ROWS = 16, 64
_RECENT = 8  # signatures per group
_WORDS = _HEADER + _ROW_WORDS * _MAX_ROWS
_ENTRIES = 32
_ENTRY = struct.Struct("QQQQd")  # its number, the key of the group, the number in the group, its text, when
_TEXTS, _NOTE_BYTES, _SOURCE_BYTES = 256, 312, 128
_TEXT_BYTES = 8 + _NOTE_BYTES + _SOURCE_BYTES  # its number, the note, the source line
_ERROR_BYTES = 4096
_ENTRIES_AT = 8 * _WORDS
_TEXTS_AT = _ENTRIES_AT + _ENTRIES * _ENTRY.size
_ERROR_AT = _TEXTS_AT + _TEXTS * _TEXT_BYTES
_SIZE = _ERROR_AT + _ERROR_BYTES


class Entry(NamedTuple):
    """A collective that has begun.

    Attributes:
        number: its number among all of the rank.
        key: the key of its group.
        place: its number among those of the group.
        when: when it began, in monotonic seconds.
        text: what it is.
        source: the line of the program that called it.
    """

    number: int
    key: int
    place: int
    when: float
    text: str
    source: str


class Record:
    """The record of another rank of this machine."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self.words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Release the file."""
        self.words.release()
        self._map.close()

    def find_row(self, key: int) -> int | None:
        """Where the words of the group with this key begin."""
        for i in range(min(self.words[ROWS], _MAX_ROWS)):
            base = _HEADER + i * _ROW_WORDS
            if self.words[base] == key:
                return base
        return None

    def count_of(self, key: int) -> int:
        """How many collectives of a group have begun on this rank."""
        base = self.find_row(key)
        return 0 if base is None else self.words[base + 1]

    def entries(self) -> list[Entry]:
        """The last collectives, the oldest first."""
        total = self.words[TOTAL]
        found = []
        for number in range(max(1, total - _ENTRIES + 1), total + 1):
            at = _ENTRIES_AT + number % _ENTRIES * _ENTRY.size
            its, key, place, text, when = _ENTRY.unpack_from(self._map, at)
            if its == number:  # else it is being overwritten
                found.append(Entry(number, key, place, when, *self._text_at(text)))
        return found

    def _text_at(self, number: int) -> tuple[str, str]:
        """A note and a source line; there are many collectives, and few texts of them."""
        at = _TEXTS_AT + number % _TEXTS * _TEXT_BYTES
        if struct.unpack_from("Q", self._map, at)[0] != number:
            return "a collective that is forgotten", "an unknown line"
        data = self._map[at + 8 : at + _TEXT_BYTES]
        return _text(data[:_NOTE_BYTES]), _text(data[_NOTE_BYTES:])

    def error(self) -> str:
        """The text of the last error, or nothing."""
        return _text(self._map[_ERROR_AT : _ERROR_AT + _ERROR_BYTES]) if self.words[ERRORS] else ""

    def handled_error(self) -> str:
        """The text of the error that was being handled when the last collective began, or nothing."""
        words = self.words
        return self.error() if words[HANDLED_AT] and words[HANDLED_AT] == words[TOTAL] else ""

    def process(self) -> str:
        """The state of the process: "runs", "stopped" or "gone"."""
        return process_state(self.words[PID], self.words[START])

    def waits(self) -> float:
        """For how many seconds the rank has been waiting in a collective; 0.0 if it does not."""
        return self._seconds_since(self.words[WAIT] or self.words[STUCK])

    def stands_still(self) -> float:
        """For how many seconds it has been waiting for anything; 0.0 if it does not."""
        return self._seconds_since(self.words[WAIT] or self.words[STUCK] or self.words[STILL])

    def _seconds_since(self, nanoseconds: int) -> float:
        return (time.monotonic_ns() - nanoseconds) / 1e9 if nanoseconds else 0.0


class Row(NamedTuple):
    """A process group in the record of this rank: where its words begin, its key, and its other ranks."""

    base: int
    key: int
    ranks: tuple[int, ...]


class OwnRecord(Record):
    """The record of this rank, which it writes."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        # written aside: a reader finds a complete header
        with open(f"{path}.new", "w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.words = memoryview(self._map).cast("Q")
        self.words[PID], self.words[START] = os.getpid(), start_time(os.getpid())
        os.replace(f"{path}.new", path)
        self._counts: dict[int, int] = {}
        self._total = 0
        self._rows = 0
        self._texts: dict[tuple[str, tuple[str, int, str]], int] = {}
        self._written = 0

    def add_row(self, group: str, ranks: tuple[int, ...]) -> Row:
        """Start to count the collectives of a group; of more than 64, the oldest is forgotten."""
        base = _HEADER + self._rows % _MAX_ROWS * _ROW_WORDS
        self._rows += 1
        key = zlib.crc32(group.encode()) + 1
        self.words[base + 1] = 0
        self.words[base] = key
        self._counts[base] = 0
        self.words[ROWS] = self._rows
        return Row(base, key, ranks)

    def holds(self, row: Row) -> bool:
        """Whether a row has not been replaced by a later one."""
        return self.words[row.base] == row.key

    def begin(self, row: Row, text: str, signature: int, source: tuple[str, int, str]) -> int:
        """Record a collective and return its number in its group."""
        words, base = self.words, row.base
        self._counts[base] = count = self._counts[base] + 1
        self._total = total = self._total + 1
        number = self._texts.get((text, source))
        if number is None:
            number = self._write_text(text, source)
        at = _ENTRIES_AT + total % _ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._map, at, total, row.key, count, number, time.monotonic())
        words[base + 2 + count % _RECENT] = signature
        words[base + 1] = count
        words[TOTAL] = total
        return count

    def note(self, text: str, source: tuple[str, int, str]) -> None:
        """Record something else than a collective of a group: that the program waits for a message, or for a new group."""
        if self.words[ERROR_AT] == self._total:  # an error stays one since the last collective
            self.words[ERROR_AT] += 1
        if self.words[HANDLED_AT] == self._total:
            self.words[HANDLED_AT] += 1
        self._total = total = self._total + 1
        number = self._texts.get((text, source)) or self._write_text(text, source)
        at = _ENTRIES_AT + total % _ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._map, at, total, 0, 0, number, time.monotonic())
        self.words[TOTAL] = total

    def _write_text(self, text: str, source: tuple[str, int, str]) -> int:
        """Write a note and a source line in the place of the oldest one, and return their number."""
        if len(self._texts) == _TEXTS:
            del self._texts[next(iter(self._texts))]
        self._written = number = self._written + 1
        file, line, name = source
        shown = f"{file}:{line} in {name}"
        data = _fitted(text, _NOTE_BYTES) + _fitted(shown, _SOURCE_BYTES, keep_end=True)
        at = _TEXTS_AT + number % _TEXTS * _TEXT_BYTES
        self._map[at : at + _TEXT_BYTES] = struct.pack("Q", number) + data
        self._texts[text, source] = number
        return number

    def post_error(self, text: str) -> None:
        """Record an error that was raised since the last collective."""
        self._map[_ERROR_AT : _ERROR_AT + _ERROR_BYTES] = _fitted(text, _ERROR_BYTES)
        self.words[ERROR_AT] = self._total
        self.words[ERRORS] += 1

    def post_handled(self, text: str | None) -> None:
        """Record an error that is being handled where a collective is about to begin; None for the one that was recorded last."""
        if text is not None:
            self._map[_ERROR_AT : _ERROR_AT + _ERROR_BYTES] = _fitted(text, _ERROR_BYTES)
            self.words[ERRORS] += 1
        self.words[HANDLED_AT] = self._total + 1


def signature_at(words: memoryview, base: int, count: int) -> int | None:
    """The signature of the collective with this number in a group, None if it has not begun or is forgotten."""
    reached: int = words[base + 1]
    if count > reached or reached - count >= _RECENT - 1:
        return None
    return words[base + 2 + count % _RECENT]


def _fitted(text: str, size: int, keep_end: bool = False) -> bytes:
    data = text.encode(errors="backslashreplace").replace(b"\0", b"\\x00")
    if len(data) > size:
        data = b"..." + data[3 - size :] if keep_end else data[: size - 3] + b"..."
    return data.ljust(size, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
