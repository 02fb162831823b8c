"""Finding out who is the cause when a rank waits in vain, from the records of the ranks of this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.faults.error import Fault
from shardwise.faults.record import (
    ENDED,
    ERROR_AT,
    ERRORS,
    GUARDED,
    GUARDS,
    HANDLES,
    LEFT,
    RAISED,
    STATE,
    TOTAL,
    OwnRecord,
    Record,
    Row,
)

__all__ = [
    "World",
    "behind",
    "broken_connection",
    "cause",
    "died",
    "diverged",
    "find_overdue",
    "gone",
    "list_ranks",
    "lost",
    "raised",
    "stopped_ranks",
]

_RAISED_SECONDS = 1.0  # a rank that raised and is about to catch it may still come


@dataclass(frozen=True)
class World:
    """The records that there are, by rank; the record of this rank, and its errors."""

    size: int
    me: OwnRecord
    records: Mapping[int, Record]
    errors: frozenset[str]  # that this rank raised lately

    @property
    def elsewhere(self) -> list[int]:
        """The ranks that have no record on this machine."""
        return [rank for rank in range(self.size) if rank not in self.records]


def behind(world: World, rows: Iterable[Row]) -> list[int]:
    """The ranks that have not begun a collective that this rank has begun."""
    found = set()
    for row in rows:
        mine = world.me.count_of(row.key)
        for rank in row.ranks:
            record = world.records.get(rank)
            if record is None or record.count_of(row.key) < mine:
                found.add(rank)
    return sorted(found - {world.me.rank})


def gone(world: World, rows: Iterable[Row]) -> list[int]:
    """The ranks of the group of this rank's last collective that died in it: they had begun it, and will not complete it."""
    entries = world.me.entries()
    ranks = {r for row in rows if entries and row.key == entries[-1].key for r in row.ranks}
    return [
        rank
        for rank, record in world.records.items()
        if rank in ranks - {world.me.rank}
        and record.words[STATE] not in (LEFT, ENDED)
        and record.process() == "gone"
    ]


def cause(world: World, ranks: Sequence[int], waited: float) -> Fault | None:
    """The fault of one of these ranks, which will not come any more; None if all of them may."""
    for rank in ranks:
        record = world.records.get(rank)
        if record is None:
            continue
        words, state = record.words, record.words[STATE]
        same_guard = _in_same_guard(world, record)
        error = record.error() if words[ERRORS] and words[ERROR_AT] == words[TOTAL] else ""
        if state == ENDED or (same_guard and state == RAISED):
            return raised(world, rank, error) if error else _ended(world, rank, "left the process group")
        if same_guard and state == LEFT:
            return _ended(world, rank, "has returned")
        if record.process() == "gone":
            return raised(world, rank, error) if error else _died(world, rank)
        is_busy_with_it = words[HANDLES] and not record.waits()  # else the program caught it, and goes on
        if error and error not in world.errors and waited > _RAISED_SECONDS and is_busy_with_it:
            return raised(world, rank, error)
    return None


def lost(world: World) -> Fault | None:
    """The fault of a rank that died, or left the same guard by an error: whatever this rank does, they cannot go on together."""
    for rank, record in world.records.items():
        words = record.words
        if rank == world.me.rank or words[STATE] in (ENDED, LEFT):
            continue
        error = record.error() if words[ERRORS] and words[ERROR_AT] == words[TOTAL] else ""
        if record.process() == "gone":
            return raised(world, rank, error) if error else _died(world, rank)
        if _in_same_guard(world, record) and words[STATE] == RAISED and error and error not in world.errors:
            return raised(world, rank, error)
    return None


def died(world: World) -> Fault | None:
    """The fault of a rank that died in the guard in which this one is. Ranks that died elsewhere may have finished."""
    for rank, record in world.records.items():
        is_in = record.words[STATE] in (GUARDED, RAISED) and _in_same_guard(world, record)
        if rank != world.me.rank and is_in and record.process() == "gone":
            return cause(world, [rank], waited=0.0)
    return None


def _in_same_guard(world: World, record: Record) -> bool:
    """Whether this rank is in the guard that a rank is in, or has left."""
    return record.words[GUARDS] == world.me.words[GUARDS] and world.me.words[STATE] == GUARDED


def raised(world: World, rank: int, error: str, then: str = "") -> Fault:
    """A rank raised an error; `error` says what, and where, and `then` which collective it called afterwards."""
    return Fault(
        "raised",
        (rank,),
        f"rank {rank} of {world.size} failed: {error}\n"
        f"{f'  rank {rank} then called {then}' + chr(10) if then else ''}{positions(world, skip=(rank,))}"
        f"  why: Rank {rank} raised this alone and takes no part in the collectives of the others any more.\n"
        f"  fix: Correct the cause on rank {rank}; an error that every rank raises leaves the groups intact.",
    )


def _died(world: World, rank: int) -> Fault:
    return Fault(
        "died",
        (rank,),
        f"rank {rank} of {world.size} died: its process {world.records[rank].words[0]} is gone.\n{positions(world)}"
        "  why: It was killed, perhaps by the system when memory ran out, or native code crashed or exited.\n"
        f"  fix: See the output of rank {rank} and the log of the system; restart from the last checkpoint.",
    )


def _ended(world: World, rank: int, how: str) -> Fault:
    return Fault(
        "ended",
        (rank,),
        f"rank {rank} of {world.size} {how} while others wait for it in a collective.\n{positions(world)}"
        f"  why: The other ranks called a collective that rank {rank} did not call.\n"
        "  fix: Let every rank call every collective; look for a branch that depends on the rank.",
    )


def diverged(world: World, rank: int, text: str, source: str, row: Row, count: int) -> Fault:
    """The fault that this rank is about to begin another collective than the one that `rank` began at the same place of a group's sequence."""
    me = world.me.rank
    entries = world.records[rank].entries()
    theirs = next((e for e in entries if (e.key, e.place) == (row.key, count)), entries[-1])
    my_error, their_error = world.me.handled_error(), world.records[rank].handled_error()
    if my_error and not their_error:
        return raised(world, me, my_error, f"{text} at {source}")
    if their_error and not my_error:
        return raised(world, rank, their_error, f"{theirs.text} at {theirs.source}")
    return Fault(
        "diverged",
        tuple(sorted((me, rank))),
        f"ranks {me} and {rank} of {world.size} call different collectives as number {count} of one group.\n"
        f"  rank {me}: {text} at {source}\n"
        f"  rank {rank}: {theirs.text} at {theirs.source}\n{positions(world, skip=(me, rank))}"
        "  why: The ranks of a group must call the same collectives, with the same layouts and dtypes, in the same order.\n"
        "  fix: Look for a branch, a shape or a dtype that depends on the rank at these two lines.",
    )


def find_overdue(world: World, late: Sequence[int], waited: float, limit: float) -> Fault:
    """The fault that this rank has waited longer than allowed for other ranks, or for a rank that waits for them, and so on."""
    culprits = _first_causes(world, list(late))
    stopped = [r for r in culprits if r in world.records and world.records[r].process() == "stopped"]
    names = list_ranks(stopped or culprits) or "no rank"
    verb = "is" if len(stopped or culprits) == 1 else "are"
    what = f"{names} of {world.size} {verb} {'stopped' if stopped else 'missing'}"
    return Fault(
        "timeout",
        tuple(stopped or culprits),
        f"{what}: rank {world.me.rank} has waited for {waited:.1f} s (limit {limit:g} s).\n{positions(world)}"
        + (
            f"  why: Its process {'has been' if len(stopped) == 1 else 'and others have been'} stopped by a signal (SIGSTOP) or a debugger.\n"
            if stopped
            else "  why: It computes longer than the limit, is stuck, or called other collectives than the others.\n"
        )
        + (
            f"  fix: Let {'it' if len(stopped) == 1 else 'them'} go on (kill -CONT), or end the program."
            if stopped
            else "  fix: Compare the lines above: the ranks must call the same collectives in the same order; "
            "or allow more time with shardwise.guard(timeout=seconds)."
        ),
    )


def _first_causes(world: World, late: list[int]) -> list[int]:
    """Ranks that are late and do not themselves wait; if all wait, all of them."""
    still = [r for r, record in world.records.items() if record.stands_still()]
    free = [r for r in late if r not in still]
    stopped = stopped_ranks(world)
    others = [r for r in world.records if r != world.me.rank and r not in still]
    return sorted(stopped or free or others or _minority(world) or late)


def stopped_ranks(world: World) -> list[int]:
    """The ranks whose process is stopped."""
    return [r for r in world.records if world.records[r].process() == "stopped"]


def _minority(world: World) -> list[int]:
    """The ranks that wait in another collective than most do; none if there is no such majority."""
    by_text: dict[str, list[int]] = {}
    for rank, record in world.records.items():
        entries = record.entries()
        by_text.setdefault(entries[-1].text if entries else "", []).append(rank)
    most = max(by_text.values(), key=len, default=[])
    return [r for r in world.records if r not in most] if 2 * len(most) > len(world.records) else []


def broken_connection(world: World, error: str) -> Fault:
    """A connection broke, and no rank of this machine is known to be the cause."""
    away = world.elsewhere
    where = f"{list_ranks(away)}, on another machine or not started" if away else "unknown"
    return Fault(
        "lost",
        tuple(away),
        f"rank {world.me.rank} of {world.size} lost the connection to another rank ({where}): {_without_source(error)}\n{positions(world)}"
        "  why: A process ended, or the network failed.\n"
        "  fix: See the output of the other ranks; restart from the last checkpoint.",
    )


def _without_source(error: str) -> str:
    """The first sentence of an error of gloo, without the line of its source and advice.

    >>> _without_source("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57039. This is typically ...")
    'Connection closed by peer [127.0.0.1]:57039.'
    """
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ", "", error).partition(" This is typically")[0]


def positions(world: World, skip: Sequence[int] = ()) -> str:
    """A line for each rank that says where it is."""
    return "".join(f"  rank {r}: {_position(world, r)}\n" for r in range(world.size) if r not in skip)


def _position(world: World, rank: int) -> str:
    record = world.records.get(rank)
    if record is None:
        return "unknown (on another machine, or it has not communicated yet)"
    entries = record.entries()
    last = f"{entries[-1].text} at {entries[-1].source}" if entries else "no collective yet"
    waited = record.stands_still()
    process = "" if (state := record.process()) == "runs" else f"{state}, "
    if waited and process != "gone, ":
        return f"{process}has waited {waited:.1f} s in number {record.words[TOTAL]}, {last}"
    ago = f" {time.monotonic() - entries[-1].when:.1f} s ago" if entries else ""
    return f"{process}last called number {record.words[TOTAL]}{ago}, {last}"


def list_ranks(ranks: Sequence[int]) -> str:
    """The names of ranks.

    >>> list_ranks([1]), list_ranks([1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
