"""The log of what the ranks of one mesh must agree on, and its comparison: one all-gather for hundreds of entries."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import Coord, is_simulated, members_of, siblings_of
from shardwise.comm.mesh import Group, group_of
from shardwise.debug.divergence import Item, divergence
from shardwise.random.stream import stream_of
from shardwise.tensor.seeding import stream_key
from shardwise.torch_internals.collectives import Note, all_gather, note_of, wait

__all__ = ["ENTRIES", "AgreementLog", "Difference", "find_difference"]

ENTRIES = 512
"""How many entries are compared at once, at most; messages always have this size, also where ranks have different numbers of entries."""
_HEADER = 4  # the number of entries, the first problem, the seed and the position of the random stream
_TEXT_BYTES = 1024
_NOTE = note_of("sanitize: comparing what the ranks have computed")
_TEXT_NOTE = note_of("sanitize: exchanging the two sides of a divergence")
Split = tuple[int, ...]
Entry = tuple[int, "int | Tensor", Split, Callable[..., Item], tuple[Any, ...]]
"""A code that all ranks must have; a value that may differ along the axes of the split only, 0 for none; and a function, with its
arguments, that returns what the entry is about, called only for an error."""


class Difference(NamedTuple):
    """The first entry on which ranks do not agree, and the ranks, by their place in the group."""

    entry: int
    kind: str
    first: int
    others: tuple[int, ...]


def find_difference(
    rows: Sequence[Sequence[int]], coords: Sequence[Coord], splits: Sequence[Split]
) -> Difference | None:
    """The first difference between the rows of some ranks; a row is a header, codes, and values.

    Args:
        rows: one for each rank.
        coords: of each rank.
        splits: for each entry, the axes along which its value may differ.

    >>> find_difference([[1, -1, 0, 0, 5, *[0] * 1023]] * 2, [(0,), (1,)], [()]) is None
    True
    >>> find_difference([[1, -1, 0, 0, 5, *[0] * 1023], [1, -1, 0, 0, 6, *[0] * 1023]], [(0,), (1,)], [()])
    Difference(entry=0, kind='order', first=0, others=(1,))
    """
    first = rows[0]
    problems = sorted((row[1], i) for i, row in enumerate(rows) if row[1] >= 0)
    if not problems and all(row == first for row in rows):
        return None
    for i in range(max(row[0] for row in rows)):
        code, value = _HEADER + i, _HEADER + ENTRIES + i
        if problems and problems[0][0] == i:
            return Difference(i, "layout", problems[0][1], ())
        if others := tuple(r for r, row in enumerate(rows) if row[code] != first[code]):
            return Difference(i, "order", 0, others)
        if all(row[value] == first[value] for row in rows):
            continue
        owners: dict[Coord, int] = {}
        for r, (row, coord) in enumerate(zip(rows, coords, strict=True)):
            owner = owners.setdefault(tuple(coord[a] for a in splits[i]), r)
            # 0 is a value that is not there any more
            if rows[owner][value] != row[value] and rows[owner][value] and row[value]:
                return Difference(i, "values", owner, (r,))
    seeds = tuple(r for r, row in enumerate(rows) if row[2:4] != first[2:4])
    return Difference(-1, "random", 0, seeds) if seeds else None


class AgreementLog:
    """What one mesh's ranks must agree on since the last comparison.

    Attributes:
        compared: how many entries were compared.
        comparisons: how many collectives that took.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.compared = self.comparisons = 0
        # a simulation compares at once
        self._group = None if is_simulated() else group_of(mesh, tuple(range(mesh.ndim)))
        self.order = () if self._group is None else tuple(sorted(self._group.ranks))
        self._clear()

    def _clear(self) -> None:
        self._entries: list[Entry] = []
        self._problem = -1

    def add(self, entry: Entry) -> None:
        """Add an entry, and compare all of them if there are enough."""
        entries = self._entries
        entries.append(entry)
        if len(entries) == ENTRIES:
            self.compare()

    def add_problem(self, entry: Entry) -> None:
        """Add an entry that this rank has found by itself to be wrong."""
        if self._problem < 0:
            self._problem = len(self._entries)
        self.add(entry)

    def add_simulated(self, values: Mapping[int, int], split: Split, item: Item) -> None:
        """Compare the fingerprints of all ranks of a simulation; raises at once."""
        self.compared += 1
        coords = members_of(self.mesh)
        for ranks in siblings_of(self.mesh):
            owners: dict[Coord, int] = {}
            for rank in ranks:
                owner = owners.setdefault(tuple(coords[rank][a] for a in split), rank)
                if values[owner] != values[rank]:
                    blocks = item.tensor() if item.tensor is not None else None
                    sides = {r: _side(item, blocks, r) for r in (owner, rank)}
                    raise divergence(item.kind, (owner, rank), sides)

    def raise_layout(self, item: Item, rank: int, found: str) -> None:
        """Raise because the block of a simulated rank does not fit its layout."""
        raise divergence("layout", [rank], {rank: f"{item.describe()}, {found}"})

    def compare(self) -> None:
        """Compare the entries with those of the other ranks of the mesh; all of them must call this.

        Raises:
            DivergenceError: the ranks do not agree. All of them raise it.
        """
        if (group := self._group) is None:
            return
        self.compared += len(self._entries)
        self.comparisons += 1
        gathered = _gather(self._row(), group, _NOTE)
        if self._problem >= 0 or not _are_alike(gathered):
            rows = gathered.tolist()
            splits = [entry[2] for entry in self._entries]
            found = find_difference(rows, group.peers, splits + [()] * ENTRIES)
            if found is not None:
                self._raise(found, rows, group)
        self._clear()

    def _row(self) -> Tensor:
        stream = stream_of(key := stream_key(self.mesh))
        agreed = not stream.from_torch or key in stream.agreed_meshes
        header = [len(self._entries), self._problem, _signed(stream.seed) if agreed else 0, stream.position]
        codes = [entry[0] for entry in self._entries]
        values = [entry[1] for entry in self._entries]
        numbers = [v if isinstance(v, int) else 0 for v in values]
        rest = [0] * (ENTRIES - len(codes))
        row = array("q", [*header, *codes, *rest, *numbers, *rest])
        data = torch.frombuffer(row, dtype=torch.int64).to(self.mesh.device_type)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                data[_HEADER + ENTRIES + i] = value
        return data

    def _raise(self, found: Difference, rows: Sequence[Sequence[int]], group: Group) -> None:
        """Exchange what each rank has to say of a difference, and raise the same error on all of them."""
        ranks = group.ranks
        if found.kind == "random":
            sides = {
                r: f"the stream of {self.mesh} has seed {row[2] % 2**64} and position {row[3]}"
                for r, row in zip(ranks, rows, strict=True)
            }
            self._clear()
            raise divergence("random", [ranks[found.first], *(ranks[i] for i in found.others)], sides)
        item = _item_of(self._entries[found.entry]) if found.entry < len(self._entries) else None
        mine = "nothing: it has run no further op" if item is None else item.describe()
        kind = found.kind if item is None or found.kind != "values" else item.kind
        data = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        text = f"{kind}\n{mine}".encode(errors="backslashreplace")[:_TEXT_BYTES]
        data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = _gather(data.to(self.mesh.device_type), group, _TEXT_NOTE)
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in every.tolist()]
        concerned = [found.first, *found.others]
        kind = texts[found.first].partition("\n")[0]
        shown = range(len(ranks)) if kind == "order" else concerned
        sides = {ranks[i]: texts[i].partition("\n")[2] for i in shown}
        self._clear()
        raise divergence(kind, [ranks[i] for i in concerned], sides)


def _side(item: Item, blocks: object, rank: int) -> str:
    """What one simulated rank has."""
    block = blocks.of_rank(rank) if hasattr(blocks, "of_rank") else blocks
    shown = None if block is None else (lambda: block)
    return Item(item.kind, item.text, item.place, item.origin, shown).describe()


def _item_of(entry: Entry) -> Item:
    return entry[3](*entry[4])


def _are_alike(rows: Tensor) -> bool:
    """Whether all rows are the same, of which none has a problem."""
    return torch.equal(rows[1:], rows[:-1])


def _gather(row: Tensor, group: Group, note: Note) -> Tensor:
    size = len(group.ranks)
    return wait(all_gather(row, size, group.name, note)).view(size, -1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def code_of(*parts: object) -> int:
    """A number of 32 bits that differs if the text of the parts does, the same in all processes."""
    return zlib.crc32(repr(parts).encode())
