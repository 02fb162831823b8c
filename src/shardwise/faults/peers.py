"""The other ranks of this machine as their records show them, and the comparison of what they call in each process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwise.faults.folder import Folder
from shardwise.faults.record import OwnRecord, Record, Row, signature_at
from shardwise.torch_internals.collectives import Note
from shardwise.torch_internals.direct_collectives import is_gloo
from shardwise.torch_internals.process_groups import resolve_group

__all__ = ["Divergence", "Groups", "Records"]


class Records:
    """The records of the world's ranks, as far as they are on this machine and have started."""

    def __init__(self, folder: Folder, own: OwnRecord, size: int) -> None:
        self._folder, self._size = folder, size
        self._known: dict[int, Record] = {own.rank: own}

    def of(self, rank: int) -> Record | None:
        """The record of a rank."""
        known = self._known.get(rank)
        if known is None and (found := self._folder.record_of(rank)) is not None:
            known = self._known[rank] = found
        return known

    def all(self) -> dict[int, Record]:
        """Those that there are, by rank."""
        for rank in range(self._size):
            self.of(rank)
        return dict(self._known)


class Divergence(NamedTuple):
    """Another rank began another collective at the same place of a group's sequence."""

    rank: int
    row: Row
    place: int


class Groups:
    """The process groups of this rank: what it calls in each of them is recorded, and compared with what other ranks called."""

    def __init__(self, own: OwnRecord, records: Records) -> None:
        self._own, self._records = own, records
        self._known: dict[str, _Group] = {}

    def rows(self) -> list[Row]:
        """Their rows in the record."""
        return [group.row for group in list(self._known.values()) if self._own.holds(group.row)]

    def is_gloo(self, group: str) -> bool:
        """Whether a group that is known uses gloo."""
        return self._known[group].is_gloo

    def begin(self, group: str, note: Note, source: tuple[str, int, str]) -> Divergence | None:
        """Record a collective that is about to begin, and find a rank that began another one."""
        known = self._known.get(group)
        if known is None or not self._own.holds(known.row):
            known = self._add(group)
        row, peers, _ = known
        count = self._own.begin(row, note.text, note.signature, source)
        for peer in peers:
            if (words := peer.words) is None:
                if not peer.connect(self._records.of, row.key):
                    continue
                words = peer.words
            base = peer.base
            if words[base] != row.key:
                peer.words = None
            elif (seen := signature_at(words, base, count)) is not None and seen != note.signature:
                return Divergence(peer.rank, row, count)
        return None

    def _add(self, name: str) -> _Group:
        group = resolve_group(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        row = self._own.add_row(name, ranks)
        peers = [_Peer(rank) for rank in ranks if rank != self._own.rank]
        known = self._known[name] = _Group(row, peers, is_gloo(group))
        return known


class _Group(NamedTuple):
    """A process group: its row in the record, its other ranks, and whether it uses gloo."""

    row: Row
    peers: list[_Peer]
    is_gloo: bool


class _Peer:
    """Another rank of a group: where its record has the words of the group, once they are known."""

    __slots__ = ("base", "rank", "words")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.words: Any = None
        self.base = 0

    def connect(self, record_of: Callable[[int], Record | None], key: int) -> bool:
        """Find the words; they are not there before the rank's first collective of the group."""
        record = record_of(self.rank)
        base = None if record is None else record.find_row(key)
        if record is None or base is None:
            return False
        self.words, self.base = record.words, base
        return True
