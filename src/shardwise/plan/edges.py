"""The edges of the redistribution search: from a layout, the steps that may lead to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from shardwise.layout import Dim, Factor, Layout, Piece, refine
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Identity, Permute, ReduceScatter, Slice, Step

__all__ = ["steps_towards"]


def steps_towards(here: Layout, goal: Layout) -> Iterator[Step]:
    """Steps from `here` towards `goal`: pending reductions are done first, and new ones arise in the last step."""
    wanted = dict(goal.partial)
    pending = {a: op for a, op in here.partial if wanted.get(a) != op}
    rescaled = {a: wanted[a] for a, op in pending.items() if {op, wanted.get(a)} == {"sum", "avg"}}
    if rescaled:
        yield Identity(here, here.with_partial(dict(here.partial) | rescaled))
    elif pending:
        yield from _reductions(here, goal, frozenset(pending))
        # An axis whose final position is inside a pending one waits for it, since it would have to move again.
        dims = [_split_by(dim, _up_to(pending)) for dim in goal.dims]
        rest = here.with_dims(dims)
        yield from _moves(here, rest)
        yield from _half_moves(here, rest)
    else:
        new = {a: op for a, op in goal.partial if a not in dict(here.partial)}
        rest = goal.without(new)
        if new and (here is rest or _embeds(here, goal)):
            yield Identity(here, goal)
        if here is not rest:
            yield from _moves(here, rest)


def _reductions(here: Layout, goal: Layout, pending: frozenset[int]) -> Iterator[Step]:
    scattered = pending & goal.sharded
    for axes in dict.fromkeys([scattered, *(frozenset({a}) for a in scattered)]):
        if axes:
            yield ReduceScatter(here, _scattered(here, goal, axes), tuple(sorted(axes)))
    # An axis that is sharded in the goal is never all-reduced, which would send twice as much as a reduce-scatter.
    if replicated := pending - scattered:
        left = {a: op for a, op in here.partial if a not in replicated}
        yield AllReduce(here, here.with_partial(left), tuple(sorted(replicated)))


def _scattered(here: Layout, goal: Layout, axes: frozenset[int]) -> Layout:
    """`here` with pending axes moved to the dims that they split in `goal`.

    A dim becomes that of the goal up to its first axis that is in use elsewhere, since elements that would be sliced off
    afterwards need not be sent. Where that leaves out some of the axes, they take their position in the goal, or the
    innermost one.
    """
    taken = (here.sharded | {a for a, _ in here.partial}) - axes
    dims: list[Dim] = []
    for ours, theirs in zip(here.dims, goal.dims, strict=True):
        have = {a for f in ours for a in f.axes}
        added = [a for f in theirs for a in f.axes if a in axes]
        known = have | set(added)
        options = [_split_by(theirs, _up_to(taken - have)), _split_by(theirs, _only(known))]
        fits = (d for d in options if known <= {a for f in d for a in f.axes} and _is_finer(ours, d, here))
        dims.append(next(fits, _appended(ours, added)))
    return Layout(here.axes, dims, {a: op for a, op in here.partial if a not in axes})


_Pick = Callable[[tuple[int, ...]], Iterable[int]]


def _split_by(dim: Dim, pick: _Pick) -> Dim:
    """The dim with each factor split by only some of its axes."""
    return tuple(Factor(f.size, tuple(pick(f.axes))) for f in dim)


def _up_to(stop: Container[int]) -> _Pick:
    return lambda axes: itertools.takewhile(lambda a: a not in stop, axes)


def _only(allowed: Container[int]) -> _Pick:
    return lambda axes: (a for a in axes if a in allowed)


def _appended(dim: Dim, axes: Sequence[int]) -> Dim:
    if not axes:
        return dim
    if not dim:
        return (Factor(1, tuple(axes)),)
    return (*dim[:-1], Factor(dim[-1].size, dim[-1].axes + tuple(axes)))


def _is_finer(coarse: Dim, fine: Dim, on: Layout) -> bool:
    pieces = refine(Layout(on.axes, [coarse]), Layout(on.axes, [fine]))
    return pieces is not None and all(_is_prefix(p.source, p.target) for p in pieces[0])


def _is_prefix(short: Sequence[int], long: Sequence[int]) -> bool:
    return tuple(long[: len(short)]) == tuple(short)


def _moves(here: Layout, there: Layout) -> Iterator[Step]:
    """The first step from one layout to another with the same pending reductions: of one, or of a slice and a gather."""
    if here is there:
        return
    pieces = refine(here, there)
    if pieces is None:
        # the blocks of some dim have no common refinement: gather that dim, and then split it
        dims = [
            ours if refine(Layout(here.axes, [ours]), Layout(here.axes, [theirs])) else _unsplit(ours)
            for ours, theirs in zip(here.dims, there.dims, strict=True)
        ]
        yield _gather(here, here.with_dims(dims))
        return
    flat = [p for dim in pieces for p in dim]
    slices = [p for p in flat if _is_prefix(p.source, p.target) and p.source != p.target]
    gathers = [p for p in flat if _is_prefix(p.target, p.source) and p.source != p.target]
    if len(slices) + len(gathers) == sum(p.source != p.target for p in flat):
        added = {a for p in slices for a in p.target[len(p.source) :]}
        if not gathers:
            yield Slice(here, there)
            return
        if not added & here.sharded:
            yield _gather(here, there) if not slices else Slice(here, _finer(here, pieces))
            return
    axes = sorted(a for p in flat for a in _changed(p))
    kind = Permute if all(_same_blocks(p, here.axes.sizes) for p in flat) else AllToAll
    yield kind(here, there, tuple(axes))


def _half_moves(here: Layout, there: Layout) -> Iterator[Step]:
    """Parts of a move to `there`: only the dims that it slices, or only those that it gathers."""
    gathered = [
        theirs if _is_finer(theirs, ours, here) else ours
        for ours, theirs in zip(here.dims, there.dims, strict=True)
    ]
    for step in Slice(here, _sliced(here, there)), _gather(here, here.with_dims(gathered)):
        if step.target is not here and step.target is not there:
            yield step


def _sliced(here: Layout, there: Layout) -> Layout:
    """`here` with those dims as in `there` that can be reached by slicing."""
    taken = here.sharded
    dims: list[Dim] = []
    for ours, theirs in zip(here.dims, there.dims, strict=True):
        new = {a for f in theirs for a in f.axes} - {a for f in ours for a in f.axes}
        free = not new & taken and not new & {a for a, _ in here.partial}
        dims.append(theirs if free and _is_finer(ours, theirs, here) else ours)
    return here.with_dims(dims)


def _embeds(here: Layout, goal: Layout) -> bool:
    """Whether blocks padded with zeros are the partial values of `goal`: only its new pending axes, innermost, are gone."""
    if not here.sharded - goal.sharded <= {a for a, _ in goal.partial}:
        return False
    pieces = refine(here, goal)
    return pieces is not None and all(_is_prefix(p.target, p.source) for dim in pieces for p in dim)


def _gather(here: Layout, there: Layout) -> AllGather:
    return AllGather(here, there, tuple(sorted(here.sharded - there.sharded)))


def _unsplit(dim: Dim) -> Dim:
    return tuple(Factor(f.size) for f in dim)


def _finer(here: Layout, pieces: Iterable[Iterable[Piece]]) -> Layout:
    """The layout with each piece split by the longer of its two lists of axes."""
    return here.with_dims([[Factor(p.size, max(p.source, p.target, key=len)) for p in dim] for dim in pieces])


def _changed(piece: Piece) -> tuple[int, ...]:
    """The axes of the source behind those that it has in common with the target; blocks come from ranks along them."""
    common = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(piece.source, piece.target, strict=False)
    )
    return piece.source[len(list(common)) :]


def _same_blocks(piece: Piece, sizes: Sequence[int]) -> bool:
    """Whether both lists of axes split the piece into the same blocks."""
    ours, theirs = [sizes[a] for a in piece.source], [sizes[a] for a in piece.target]
    count = math.prod(ours)
    return ours == theirs or (count == math.prod(theirs) and piece.size % count == 0)
