"""Even splits: the tiles that peers send each other are all equal, so one permutation packs or unpacks them.

A dim that axes split evenly is a product of digits and a rest: `[8:dp]` over dp=4 is (4 2), where the first factor is
indexed by the coord on dp. An axis of size 4 that meets one of size 2 is two digits of size 2. A digit of the source
layout is an index of the sender, a digit of the target layout one of the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardwise.comm.mesh import Coord
from shardwise.layout import Piece, Pieces, cut

__all__ = ["Permutation", "TileGrid", "Tiles", "tile_grid"]


class _Digit(NamedTuple):
    """A part of the coord on an axis."""

    axis: int
    size: int
    stride: int

    def of(self, coord: Coord) -> int:
        return coord[self.axis] // self.stride % self.size


class _Factor(NamedTuple):
    """A factor of the full tensor, and the digits that index it in the source and in the target layout."""

    size: int
    source: _Digit | None
    target: _Digit | None


class _PeerDigit(NamedTuple):
    """A digit of the peers' coords: the factor it indexes, and its one value for which there is a tile, or all."""

    size: int
    factor: int | None
    value: int | None


class Permutation(NamedTuple):
    """Another order of the elements of a tensor."""

    view: tuple[int, ...]
    select: tuple[tuple[int, int], ...]  # (dim, index) of dims to drop, last dim first
    order: tuple[int, ...]  # of the remaining dims
    copies: tuple[tuple[int, int], ...]  # (dim, size) of dims to insert, first dim first

    @property
    def is_identity(self) -> bool:
        return not self.select and not self.copies and self.order == tuple(range(len(self.order)))

    def __call__(self, x: Tensor) -> Tensor:
        """The elements of `x` in the new order, as a view where the strides allow it."""
        x = x.reshape(self.view)
        for dim, index in self.select:
            x = x.select(dim, index)
        x = x.permute(self.order)
        for dim, size in self.copies:
            x = x.unsqueeze(dim).expand(*x.shape[:dim], size, *x.shape[dim:])
        return x


class Tiles(NamedTuple):
    """The number of elements for each peer, and the permutation from block to tiles or from tiles to block."""

    counts: tuple[int, ...]
    permutation: Permutation


class TileGrid(NamedTuple):
    """The tiles that `me` exchanges with its peers over `axes`, its own tile among them."""

    factors: tuple[_Factor, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    me: Coord

    def leaving(self) -> Tiles:
        """The tiles of the source block, one for each receiver."""
        factors = self.factors
        digits = self._peer_digits([f.target for f in factors], [f.source for f in factors])
        free = [d for d in digits if d.value is None]
        in_block = [i for i, f in enumerate(factors) if f.source is None]
        # a dim that an axis outside of the group splits: all receivers want the same index of it
        fixed = {i: t.of(self.me) for i in in_block if (t := factors[i].target) and t.axis not in self.axes}
        remaining = [i for i in in_block if i not in fixed]
        order = [d.factor for d in free if d.factor is not None]
        order += [i for i in remaining if factors[i].target is None]
        permutation = Permutation(
            tuple(factors[i].size for i in in_block),
            tuple((in_block.index(i), fixed[i]) for i in reversed(fixed)),
            tuple(map(remaining.index, order)),
            tuple((dim, d.size) for dim, d in enumerate(free) if d.factor is None),
        )
        return Tiles(self._counts(digits, [f.target for f in factors]), permutation)

    def arriving(self) -> Tiles | None:
        """The tiles of the target block, one from each sender; None if they do not make up the block."""
        factors = self.factors
        digits = self._peer_digits([f.source for f in factors], [f.target for f in factors])
        received = [-1 if d.factor is None else d.factor for d in digits if d.value is None]
        received += [i for i, f in enumerate(factors) if f.source is None and f.target is None]
        wanted = [i for i, f in enumerate(factors) if f.target is None]
        if sorted(received) != wanted:
            return None
        view = tuple(factors[i].size for i in received)
        permutation = Permutation(view, (), tuple(map(received.index, wanted)), ())
        return Tiles(self._counts(digits, [f.source for f in factors]), permutation)

    def _peer_digits(self, theirs: list[_Digit | None], mine: list[_Digit | None]) -> list[_PeerDigit]:
        """The digits of peers' coords in peer order, given the digit of each factor for peers and for `me`."""
        out = []
        for axis in self.axes:
            found = [i for i, digit in enumerate(theirs) if digit is not None and digit.axis == axis]
            for i in found:
                own = mine[i]
                out.append(_PeerDigit(self.factors[i].size, i, None if own is None else own.of(self.me)))
            if not found and self.sizes[axis] > 1:
                out.append(_PeerDigit(self.sizes[axis], None, None))
        return out

    def _counts(self, digits: list[_PeerDigit], theirs: list[_Digit | None]) -> tuple[int, ...]:
        """The elements for each peer, given its digits; peers that hold another part of a factor get none."""
        local = [f.size for f in self.factors if f.source is None and f.target is None]
        outside = [
            (f.source, f.target)
            for f, digit in zip(self.factors, theirs, strict=True)
            if f.source and f.target and digit and digit.axis not in self.axes
        ]
        matches = all(s.of(self.me) == t.of(self.me) for s, t in outside)
        counts: tuple[int, ...] = (math.prod(local) if matches else 0,)
        for size, _, value in reversed(digits):
            none = (0,) * len(counts)
            counts = counts * size if value is None else none * value + counts + none * (size - 1 - value)
        return counts


def tile_grid(pieces: Pieces, sizes: Sequence[int], axes: tuple[int, ...], me: Coord) -> TileGrid | None:
    """The tiles between `me` and its peers over `axes`, or None if they are not all equal."""
    factors: list[_Factor] = []
    for piece in (piece for dim in pieces for piece in dim):
        split = _split(piece, sizes, axes, me)
        if split is None:
            return None
        factors += split
    return TileGrid(tuple(f for f in factors if f.size != 1), tuple(sizes), axes, me)


def _split(piece: Piece, sizes: Sequence[int], axes: tuple[int, ...], me: Coord) -> list[_Factor] | None:
    """A piece as factors that have at most one digit on either side; None if it is not split evenly.

    On leading axes that are the same on both sides, `me` and its peers have the same coords: only their block counts.

    >>> [f.size for f in _split(Piece(12, (0,), (1,)), (4, 2), (0,), (0, 0))]
    [2, 2, 3]
    """
    size, source, target = piece
    common = 0
    while common < min(len(source), len(target)) and source[common] == target[common]:
        common += 1
    if common:
        shared = source[:common]
        if not set(shared).isdisjoint(axes):
            return None
        low, high = cut(size, [sizes[a] for a in shared], [me[a] for a in shared])
        size = high - low
    # axes with the part of their size that is not yet in a factor, innermost first
    sides = [[(a, sizes[a]) for a in reversed(side[common:])] for side in (source, target)]
    out = []
    while any(sides):
        n = min(side[-1][1] for side in sides if side)
        digits: list[_Digit | None] = []
        for side in sides:
            if not side:
                digits.append(None)
                continue
            axis, rest = side.pop()
            if rest % n:
                return None
            digits.append(_Digit(axis, n, rest // n))
            if rest > n:
                side.append((axis, rest // n))
        if size % n:
            return None
        size //= n
        out.append(_Factor(n, *digits))
    return [*out, _Factor(size, None, None)]
