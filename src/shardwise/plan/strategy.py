"""Choosing how an op runs: for each axis a role that its operands suggest, at the least cost of moving them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.layout import Axes, Dim, Factor, Layout, LayoutError, cut, largest_block, view
from shardwise.plan.cost import DEFAULT_COSTS, CostModel
from shardwise.plan.redistribute import plan_redistribute
from shardwise.rules import Candidate, Listed, Rule
from shardwise.rules.rule import Letters

__all__ = ["Choice", "choose", "choose_view", "every_choice"]

_MOST_OPTIONS = 512
_EXACT = 4  # how many of the cheapest by estimate are planned for real


@dataclass(frozen=True)
class Choice:
    """The layouts an op runs in: those its inputs must have, and those its outputs then have."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class _Role(NamedTuple):
    """What an axis does in an op: split a letter, pass a pending reduction of a group of inputs, or nothing."""

    letter: str | None = None
    op: str | None = None
    group: frozenset[int] = frozenset()


_NOTHING = _Role()


def choose(
    rule: Rule | Listed,
    layouts: Sequence[Layout],
    outputs: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    fixed: Sequence[Layout] = (),
    model: CostModel = DEFAULT_COSTS,
    kept: Sequence[int] = (),
) -> Choice | None:
    """The cheapest choice a rule allows; with `fixed`, only those whose first outputs lie so. None if there is none.

    The inputs numbered in `kept` may not move: the op writes to them. On a tie it moves the fewest inputs: what is
    replicated is not cut for nothing.
    """
    found: list[tuple[tuple[float, int, int], int, Choice]] = []
    for number, choice in enumerate(_choices(rule, layouts, outputs)):
        # what is written in place neither lies otherwise afterwards nor is moved before
        if choice is None or any(
            a is not b or a is not c for a, b, c in zip(fixed, choice.outputs, choice.inputs, strict=False)
        ):
            continue
        if any(choice.inputs[i] is not layouts[i] for i in kept):
            continue
        if not rule.empty and any(_has_empty(layout) for layout in choice.inputs):
            continue
        pairs = list(zip(layouts, choice.inputs, itemsizes, strict=True))
        guess = sum(_estimate(a, b, size, model) for a, b, size in pairs)
        moved = sum(a is not b for a, b, _ in pairs)
        held = sum(largest_block(o) for o in choice.outputs)
        found.append(((guess, moved, held), number, choice))
        if moved == 0:
            break  # nothing beats a choice that moves nothing
    found.sort(key=lambda entry: entry[:2])
    if not found:
        return None
    if found[0][0][0] == 0.0 or len(found) == 1:
        return found[0][2]

    def exact(entry: tuple[tuple[float, int, int], int, Choice]) -> tuple[float, int, int, int]:
        (_, moved, held), number, choice = entry
        seconds = 0.0
        for a, b, size in zip(layouts, choice.inputs, itemsizes, strict=True):
            if a is not b:
                seconds += sum(
                    model.seconds(step, size) for step in plan_redistribute(a, b, size, model).steps
                )
        return seconds, moved, held, number

    return min(found[:_EXACT], key=exact)[2]


def every_choice(
    rule: Rule | Listed, shapes: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], axes: Axes
) -> Iterator[Choice]:
    """All that a rule allows on a mesh, whatever lies where: what a proof of the rule must try."""
    layouts = [Layout.replicated(s, axes) for s in shapes]
    if isinstance(rule, Listed):
        found = list(_choices(rule, layouts, outputs))
    else:
        letters = dict.fromkeys(x for said in rule.inputs for x in said if x is not None)
        roles = [_Role(letter=x) for x in letters]
        roles += [_Role(op=op, group=group) for group in rule.linear for op in ("sum", "avg")]
        roles += [_Role(op=op, group=frozenset({i})) for op in rule.monotone for i in range(len(shapes))]
        every = list(itertools.product([*roles, _NOTHING], repeat=len(axes)))
        found = [_choice(rule, layouts, outputs, r) for r in every]
        if len(axes) == 1:
            found += [_choice(rule, _cut_inside(rule, layouts, r), outputs, r) for r in every]
    for choice in dict.fromkeys(found):
        if choice is not None and (rule.empty or not any(_has_empty(i) for i in choice.inputs)):
            yield choice


def _cut_inside(rule: Rule, layouts: Sequence[Layout], roles: Sequence[_Role]) -> list[Layout]:
    """Layouts in which the first axis splits its letter within parts of the dim, as a view may leave it."""
    letter = roles[0].letter
    out = []
    for said, layout in zip(rule.inputs, layouts, strict=True):
        at = next((d for d, x in enumerate(said) if x is not None and x == letter), None)
        size = 0 if at is None else layout.shape[at]
        parts = next((n for n in range(2, size) if size % n == 0), None)
        if at is not None and parts is not None:
            layout = layout.with_dim(at, Factor(parts), Factor(size // parts, (0,)))
        out.append(layout)
    return out


def _choices(
    rule: Rule | Listed, layouts: Sequence[Layout], outputs: Sequence[Sequence[int]]
) -> Iterator[Choice | None]:
    if isinstance(rule, Listed):
        return (_listed(layouts, outputs, c) for c in _combinations(rule, layouts))
    return (_choice(rule, layouts, outputs, roles) for roles in _assignments(rule, layouts))


def _combinations(rule: Listed, layouts: Sequence[Layout]) -> Iterator[tuple[Candidate, ...]]:
    """One candidate per axis, in all combinations; of too many, those that move the most are left out."""
    axes: list[list[Candidate]] = []
    for axis, size in enumerate(layouts[0].axes.sizes):
        here = [layout.placements[axis] for layout in layouts]
        moves = [
            sum(a != b for a, b in zip(here, c.inputs, strict=True)) if size > 1 else 0
            for c in rule.candidates
        ]
        order = sorted(range(len(moves)), key=lambda i: (moves[i], i))
        axes.append([rule.candidates[i] for i in order])
    while math.prod(len(c) for c in axes) > _MOST_OPTIONS:
        del max(axes, key=len)[-1]
    return itertools.product(*axes)


def _listed(
    layouts: Sequence[Layout], outputs: Sequence[Sequence[int]], chosen: Sequence[Candidate]
) -> Choice | None:
    axes = layouts[0].axes
    try:
        return Choice(
            tuple(Layout.of(t.shape, axes, [c.inputs[i] for c in chosen]) for i, t in enumerate(layouts)),
            tuple(Layout.of(s, axes, [c.outputs[i] for c in chosen]) for i, s in enumerate(outputs)),
        )
    except LayoutError:
        return None  # reductions that do not mix


def _has_empty(layout: Layout) -> bool:
    """Whether some rank has nothing of a dim of which there is something."""
    sizes = layout.axes.sizes
    return any(
        f.size > 0 and low == high
        for dim in layout.dims
        for f in dim
        for low, high in [cut(f.size, [sizes[a] for a in f.axes], [sizes[a] - 1 for a in f.axes])]
    )


def _assignments(rule: Rule, layouts: Sequence[Layout]) -> Iterator[tuple[_Role, ...]]:
    """One role per axis, in all combinations of those that the operands suggest."""
    roles: list[list[_Role]] = []
    for axis, size in enumerate(layouts[0].axes.sizes):
        found = dict.fromkeys(_roles(rule, layouts, axis)) if size > 1 else {}
        roles.append([*found, _NOTHING])
    while math.prod(len(r) for r in roles) > _MOST_OPTIONS:
        del max(roles, key=len)[-2]
    return itertools.product(*roles)


def _roles(rule: Rule, layouts: Sequence[Layout], axis: int) -> Iterator[_Role]:
    for i, layout in enumerate(layouts):
        for d, dim in enumerate(layout.dims):
            letter = rule.inputs[i][d]
            if letter is not None and any(axis in f.axes for f in dim):
                yield _Role(letter=letter)
        op = dict(layout.partial).get(axis)
        if op in ("sum", "avg"):
            for group in rule.linear:
                if i in group:
                    yield _Role(op=op, group=group)
        elif op is not None and op in rule.monotone:
            yield _Role(op=op, group=frozenset({i}))


def _choice(
    rule: Rule, layouts: Sequence[Layout], outputs: Sequence[Sequence[int]], roles: Sequence[_Role]
) -> Choice | None:
    axes = layouts[0].axes
    split: dict[str, list[int]] = {}
    for axis, role in enumerate(roles):
        if role.letter is not None:
            split.setdefault(role.letter, []).append(axis)
    dim_of = {letter: _dim_for(rule, layouts, letter, on) for letter, on in split.items()}

    def dims(said: Letters, shape: Sequence[int]) -> list[Dim]:
        return [
            _of_size(dim_of[x], n, axes) if x in dim_of else (Factor(n),)
            for x, n in zip(said, shape, strict=True)
        ]

    passed = {a: rule.monotone.get(r.op, r.op) for a, r in enumerate(roles) if r.op is not None}
    reduced = {a: r.letter for a, r in enumerate(roles) if r.letter is not None and r.letter in rule.reduced}

    def parts(i: int) -> dict[int, str]:
        out = {a: r.op for a, r in enumerate(roles) if r.op is not None and i in r.group}
        return out | {a: rule.reduced[x] for a, x in reduced.items() if i in rule.addends}

    for number, (said, shape) in enumerate(zip(rule.outputs, outputs, strict=True)):
        # an output that knows nothing of a split letter would be a guess, unless there is nothing in it
        known = number in rule.alike or tuple(shape) == (0,)
        if not known and any(x not in said and x not in rule.reduced for x in split):
            return None
    try:
        ins = tuple(Layout(axes, dims(rule.inputs[i], t.shape), parts(i)) for i, t in enumerate(layouts))
        outs = tuple(
            Layout.replicated(s, axes)
            if number in rule.alike
            else Layout(
                axes,
                dims(said, s),
                passed | {a: rule.reduced[x] for a, x in reduced.items() if x not in said},
            )
            for number, (said, s) in enumerate(zip(rule.outputs, outputs, strict=True))
        )
    except LayoutError:
        return None  # reductions that do not mix
    return Choice(ins, outs)


def _dim_for(rule: Rule, layouts: Sequence[Layout], letter: str, on: Sequence[int]) -> Dim:
    """How a letter is cut by some axes: as the operand that has most of them has it, the rest innermost."""
    best: Dim = ()
    rank = (-1, -1)
    for said, layout in zip(rule.inputs, layouts, strict=True):
        for d, x in enumerate(said):
            if x == letter:
                dim = tuple(Factor(f.size, tuple(a for a in f.axes if a in on)) for f in layout.dims[d])
                here = (sum(len(f.axes) for f in dim), math.prod(layout.shape))
                if here > rank:
                    best, rank = dim, here
    missing = tuple(a for a in on if all(a not in f.axes for f in best))
    if missing:
        last = best[-1] if best else Factor(1)
        best = (*best[:-1], Factor(last.size, last.axes + missing))
    if letter in rule.ranges and any(f.axes for f in best[1:]):
        return (Factor(math.prod(f.size for f in best), tuple(a for f in best for a in f.axes)),)
    return best


def _of_size(dim: Dim, size: int, axes: Axes) -> Dim:
    """A letter's cut for a dim of another size: several heads may share one. Then blocks must correspond."""
    whole = math.prod(f.size for f in dim)
    if whole == size:
        return dim
    on = dim[0].axes
    parts = math.prod(axes.sizes[a] for a in on)
    if len(dim) > 1 or whole % parts or size % parts:
        raise LayoutError(
            f"dims of {whole} and {size} are one letter.",
            why=f"{parts} blocks of one do not go with those of the other",
            fix="split what both can be divided by",
        )
    return (Factor(size, on),)


def _estimate(source: Layout, target: Layout, itemsize: int, model: CostModel) -> float:
    """A quick guess at what a redistribution costs: 0 only if it is free."""
    if source is target:
        return 0.0
    here, there, seconds = largest_block(source) * itemsize, largest_block(target) * itemsize, 0.0
    for axis, (a, b) in enumerate(zip(source.placements, target.placements, strict=True)):
        if a == b or a.is_replicate() or (a.is_partial() and b.is_partial()):
            continue
        n = source.axes.sizes[axis]
        latency, width = model.pace((axis,))
        sent = (
            (2 * here if b.is_replicate() else here)
            if a.is_partial()
            else (there if b.is_replicate() else here)
        )
        seconds += latency + sent * (n - 1) / n / width
    return seconds


def choose_view(
    layout: Layout, shape: Sequence[int], itemsize: int, model: CostModel = DEFAULT_COSTS
) -> Choice:
    """The cheapest layout in which a tensor can be seen as another shape: its own, or with fewer axes."""
    axes = sorted(layout.sharded)
    for count in range(len(axes) + 1):
        options = []
        for gone in itertools.combinations(axes, count):
            fewer = layout.without(gone)
            try:
                options.append(
                    (_estimate(layout, fewer, itemsize, model), gone, Choice((fewer,), (view(fewer, shape),)))
                )
            except LayoutError:
                continue
        if options:
            return min(options, key=lambda option: option[:2])[2]
    raise RuntimeError(f"{layout} cannot be seen as {tuple(shape)}, which is a mistake in shardwise")
