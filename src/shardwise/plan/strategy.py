"""Choosing the layouts in which an op runs: a role per mesh axis, at the least cost of moving the operands."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from shardwise.layout import (
    Axes,
    Dim,
    Factor,
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Shard,
    has_empty_blocks,
    largest_block,
    view,
)
from shardwise.plan.cost import CostModel
from shardwise.plan.redistribute import plan_redistribute
from shardwise.plan.settings import current_costs
from shardwise.plan.symbolic_time import time_of
from shardwise.rules import Candidate, Listed, Rule
from shardwise.rules.rule import Letters

__all__ = ["Choice", "choose", "choose_view", "every_choice"]

_T = TypeVar("_T")
_MAX_COMBINATIONS = 1 << 12
_ESTIMATED = 16  # how many choices are ranked by their estimate,
_PLANNED = 4  # and how many of those are compared by their plans


@dataclass(frozen=True)
class Choice:
    """The layouts an op runs in: those its inputs must have, and those its outputs then have."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class _Role(NamedTuple):
    """What an axis does in an op: split a letter, pass a pending reduction of some inputs through, or nothing."""

    letter: str | None = None
    op: str | None = None
    inputs: frozenset[int] = frozenset()


_NOTHING = _Role()


def choose(
    rule: Rule | Listed,
    layouts: Sequence[Layout],
    outputs: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    fixed: Sequence[Layout] = (),
    kept: Sequence[int] = (),
) -> Choice | None:
    """The cheapest choice that a rule allows, or None if there is none.

    Choices are generated in order of an estimate, and the first few are compared by their plans. Among equally cheap
    ones the choice that moves the fewest inputs wins, so that replicated inputs are not sliced without need.

    Args:
        rule: the rule of the op for this call.
        layouts: the layouts of the inputs.
        outputs: the shapes of the outputs.
        itemsizes: bytes per element of the inputs.
        fixed: layouts that the first inputs and outputs must have, because the op writes to them and returns them.
        kept: inputs that may not move, because the op writes to them.
    """
    model = current_costs()
    found: list[tuple[tuple[float, int, int, int], Choice]] = []
    for number, (guess, choice) in enumerate(_choices(rule, layouts, outputs, itemsizes, model)):
        if len(found) >= _PLANNED and guess > found[_PLANNED - 1][0][0]:
            break  # this and all later ones are dearer than those that will be planned
        if choice is None or not _is_allowed(rule, choice, layouts, fixed, kept):
            continue
        moved = sum(a is not b for a, b in zip(layouts, choice.inputs, strict=True))
        if moved == 0:
            return choice
        held = sum(largest_block(o) for o in choice.outputs)
        found.append(((guess, moved, held, number), choice))
        if len(found) == _ESTIMATED:
            break

    def cost(entry: tuple[tuple[float, int, int, int], Choice]) -> tuple[float, int, int, int]:
        (_, moved, held, number), choice = entry
        pairs = zip(layouts, choice.inputs, itemsizes, strict=True)
        seconds = model.total(plan_redistribute(a, b, n) for a, b, n in pairs if a is not b)
        return seconds, moved, held, number

    found.sort(key=lambda entry: entry[0])
    return min(found[:_PLANNED], key=cost)[1] if found else None


def _is_allowed(
    rule: Rule | Listed,
    choice: Choice,
    layouts: Sequence[Layout],
    fixed: Sequence[Layout],
    kept: Sequence[int],
) -> bool:
    # a tensor that is written in place is neither moved before nor laid out differently afterwards
    written = zip(fixed, choice.outputs, choice.inputs, strict=False)
    if any(a is not b or a is not c for a, b, c in written):
        return False
    if any(choice.inputs[i] is not layouts[i] for i in kept):
        return False
    return rule.empty or not any(has_empty_blocks(layout) for layout in choice.inputs)


def every_choice(
    rule: Rule | Listed, shapes: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], axes: Axes
) -> Iterator[Choice]:
    """All choices that a rule allows on a mesh, for any layouts of the operands: what a proof of the rule runs."""
    layouts = [Layout.replicated(s, axes) for s in shapes]
    if isinstance(rule, Listed):
        combinations = itertools.product(rule.candidates, repeat=len(axes))
        found = [_listed(layouts, outputs, chosen) for chosen in combinations]
    else:
        letters = dict.fromkeys(x for one in rule.inputs for x in one if x is not None)
        roles = [_Role(letter=x) for x in letters]
        roles += [_Role(op=op, inputs=group) for group in rule.linear for op in ("sum", "avg")]
        roles += [_Role(op=op, inputs=frozenset({i})) for op in rule.monotone for i in range(len(shapes))]
        roles += [_Role(op=op, inputs=frozenset(range(len(shapes)))) for op in sorted(rule.jointly)]
        roles += [
            _Role(op=op, inputs=frozenset({i})) for op in sorted(rule.singly) for i in range(len(shapes))
        ]
        every = list(itertools.product([*roles, _NOTHING], repeat=len(axes)))
        found = [_choice(rule, layouts, outputs, r) for r in every]
        if len(axes) == 1:
            found += [_choice(rule, _split_inner_factors(rule, layouts, r), outputs, r) for r in every]
    for choice in dict.fromkeys(found):
        if choice is not None and (rule.empty or not any(has_empty_blocks(i) for i in choice.inputs)):
            yield choice


def _split_inner_factors(rule: Rule, layouts: Sequence[Layout], roles: Sequence[_Role]) -> list[Layout]:
    """Layouts in which the first axis splits an inner factor of its letter, as after a view."""
    letter = roles[0].letter
    out = []
    for letters, layout in zip(rule.inputs, layouts, strict=True):
        at = next((d for d, x in enumerate(letters) if x is not None and x == letter), None)
        size = 0 if at is None else layout.shape[at]
        parts = next((n for n in range(2, size) if size % n == 0), None)
        if at is not None and parts is not None:
            layout = layout.with_dim(at, Factor(parts), Factor(size // parts, (0,)))
        out.append(layout)
    return out


def _choices(
    rule: Rule | Listed,
    layouts: Sequence[Layout],
    outputs: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    model: CostModel,
) -> Iterator[tuple[float, Choice | None]]:
    """The choices of a rule with their estimated cost, cheapest first."""
    blocks = [largest_block(t) * n for t, n in zip(layouts, itemsizes, strict=True)]
    placements, on = [t.placements for t in layouts], layouts[0].axes

    def cost(axis: int, wanted: Sequence[Placement]) -> tuple[float, int]:
        """The cost of moving every input to its placement on one axis, and how many inputs it changes."""
        seconds, changed = 0.0, 0
        for here, there, size in zip(placements, wanted, blocks, strict=True):
            seconds += _axis_seconds(here[axis], there, size, on, axis, model)
            changed += here[axis] != there
        return seconds, changed

    if isinstance(rule, Listed):
        options = [
            [(cost(a, c.inputs) if n > 1 else (0.0, 0), c) for c in rule.candidates]
            for a, n in enumerate(on.sizes)
        ]
        for guess, candidates in _cheapest_combinations(options):
            yield guess, _listed(layouts, outputs, candidates)
    else:
        roles = [
            [(cost(a, _placements_of(rule, r)), r) for r in _roles(rule, layouts, a)] for a in range(len(on))
        ]
        for guess, chosen in _cheapest_combinations(roles):
            yield guess, _choice(rule, layouts, outputs, chosen)


def _cheapest_combinations(
    options: Sequence[Sequence[tuple[tuple[float, int], _T]]],
) -> Iterator[tuple[float, tuple[_T, ...]]]:
    """One option per axis in all combinations, in order of their summed costs; of very many the cheapest only."""
    ranked = [sorted(enumerate(some), key=lambda o: (o[1][0], o[0])) for some in options]
    if not all(ranked):
        return

    def entry(at: tuple[int, ...]) -> tuple[tuple[float, int], tuple[int, ...], tuple[int, ...]]:
        picked = [ranked[a][i] for a, i in enumerate(at)]
        cost = (sum(o[1][0][0] for o in picked), sum(o[1][0][1] for o in picked))
        return cost, tuple(o[0] for o in picked), at

    queue = [entry((0,) * len(ranked))]
    seen = {queue[0][2]}
    for _ in range(_MAX_COMBINATIONS):
        if not queue:
            return
        (seconds, _), _, at = heapq.heappop(queue)
        yield seconds, tuple(ranked[a][i][1][1] for a, i in enumerate(at))
        for a, i in enumerate(at):
            further = (*at[:a], i + 1, *at[a + 1 :])
            if i + 1 < len(ranked[a]) and further not in seen:
                seen.add(further)
                heapq.heappush(queue, entry(further))


def _placements_of(rule: Rule, role: _Role) -> list[Placement]:
    """The placement of each input on an axis that has this role."""
    out: list[Placement] = []
    for i, letters in enumerate(rule.inputs):
        if role.letter is not None and role.letter in letters:
            out.append(Shard(letters.index(role.letter)))
        elif role.letter in rule.reduced and i in rule.addends:
            out.append(Partial(rule.reduced[role.letter]))  # type: ignore[index]
        else:
            out.append(Partial(role.op) if role.op is not None and i in role.inputs else Replicate())
    return out


def _axis_seconds(
    here: Placement, there: Placement, size: int, on: Axes, axis: int, model: CostModel
) -> float:
    """The estimated cost of changing a tensor's placement on one axis, from the bytes of its largest block."""
    if here.is_replicate() or (here.is_partial() and there.is_partial()):
        return 0.0
    if isinstance(here, Shard) and isinstance(there, Shard) and here.dim == there.dim:
        return 0.0
    n = on.sizes[axis]
    latency, bandwidth = model.pace(on, (axis,))
    if type(size) is not int:
        share = (2 / n if here.is_partial() else 1) if there.is_replicate() else 1 / n
        return time_of(latency, size, share * (n - 1) / bandwidth)  # type: ignore[no-any-return]
    if there.is_replicate():
        sent = 2 * size * (n - 1) / n if here.is_partial() else size * (n - 1)
    else:
        sent = size * (n - 1) / n
    return latency + sent / bandwidth


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
        return None  # different reductions cannot be pending at once


def _roles(rule: Rule, layouts: Sequence[Layout], axis: int) -> list[_Role]:
    """The roles of an axis that occur in the layouts of the operands, and last the one that does nothing."""
    found: dict[_Role, None] = {}
    if layouts[0].axes.sizes[axis] > 1:
        for i, layout in enumerate(layouts):
            for d, dim in enumerate(layout.dims):
                letter = rule.inputs[i][d]
                if letter is not None and any(axis in f.axes for f in dim):
                    found[_Role(letter=letter)] = None
            op = dict(layout.partial).get(axis)
            if op in ("sum", "avg"):
                found |= {_Role(op=op, inputs=group): None for group in rule.linear if i in group}
            elif op is not None:
                if op in rule.monotone:
                    found[_Role(op=op, inputs=frozenset({i}))] = None
                if op in rule.jointly:
                    found[_Role(op=op, inputs=frozenset(range(len(layouts))))] = None
                if op in rule.singly:
                    found[_Role(op=op, inputs=frozenset({i}))] = None
    return [*found, _NOTHING]


def _choice(
    rule: Rule, layouts: Sequence[Layout], outputs: Sequence[Sequence[int]], roles: Sequence[_Role]
) -> Choice | None:
    axes = layouts[0].axes
    split: dict[str, list[int]] = {}
    for axis, role in enumerate(roles):
        if role.letter is not None:
            split.setdefault(role.letter, []).append(axis)
    dim_of = {letter: _dim_for(rule, layouts, letter, on) for letter, on in split.items()}

    def dims(letters: Letters, shape: Sequence[int]) -> list[Dim]:
        pairs = zip(letters, shape, strict=True)
        return [_of_size(dim_of[x], n, axes) if x in dim_of else (Factor(n),) for x, n in pairs]

    passed = {a: rule.monotone.get(r.op, r.op) for a, r in enumerate(roles) if r.op is not None}
    reduced = {a: r.letter for a, r in enumerate(roles) if r.letter is not None and r.letter in rule.reduced}

    def input_layout(i: int) -> Layout:
        partial = {a: r.op for a, r in enumerate(roles) if r.op is not None and i in r.inputs}
        if i in rule.addends:
            partial |= {a: rule.reduced[x] for a, x in reduced.items()}
        return Layout(axes, dims(rule.inputs[i], layouts[i].shape), partial)

    def output_layout(i: int, shape: Sequence[int]) -> Layout:
        if i in rule.alike:
            return Layout.replicated(shape, axes)
        letters = rule.outputs[i]
        pending = {a: rule.reduced[x] for a, x in reduced.items() if x not in letters}
        return Layout(axes, dims(letters, shape), passed | pending)

    for i, (letters, shape) in enumerate(zip(rule.outputs, outputs, strict=True)):
        # the layout of an output is unknown if it lacks a split letter that is not reduced, unless it is empty
        known = i in rule.alike or tuple(shape) == (0,)
        if not known and any(x not in letters and x not in rule.reduced for x in split):
            return None
    try:
        return Choice(
            tuple(input_layout(i) for i in range(len(layouts))),
            tuple(output_layout(i, shape) for i, shape in enumerate(outputs)),
        )
    except LayoutError:
        return None  # different reductions cannot be pending at once


def _dim_for(rule: Rule, layouts: Sequence[Layout], letter: str, on: Sequence[int]) -> Dim:
    """How some axes split a letter: as in the operand that most of them split already, the others innermost."""
    options: list[tuple[int, int, Dim]] = []
    for letters, layout in zip(rule.inputs, layouts, strict=True):
        for d in (d for d, x in enumerate(letters) if x == letter):
            dim = tuple(Factor(f.size, tuple(a for a in f.axes if a in on)) for f in layout.dims[d])
            options.append((sum(len(f.axes) for f in dim), math.prod(layout.shape), dim))
    most = max(count for count, _, _ in options)
    options = [option for option in options if option[0] == most]
    if all(dim == options[0][2] for _, _, dim in options):
        best = options[0][2]
    else:
        best = max(options, key=lambda option: option[1])[2]
    missing = tuple(a for a in on if all(a not in f.axes for f in best))
    if missing:
        last = best[-1] if best else Factor(1)
        best = (*best[:-1], Factor(last.size, last.axes + missing))
    if letter in rule.ranges and any(f.axes for f in best[1:]):
        return (Factor(math.prod(f.size for f in best), tuple(a for f in best for a in f.axes)),)
    return best


def _of_size(dim: Dim, size: int, axes: Axes) -> Dim:
    """How a letter is split in a dim of another size, such as that of fewer key heads: into the same shares on each rank."""
    full = math.prod(f.size for f in dim)
    if full == size:
        return dim
    first, parts = dim[0], math.prod(axes.sizes[a] for a in dim[0].axes)
    if 0 not in (full, size) and not any(f.axes for f in dim[1:]):
        rest, group = full // first.size, full // size
        if size % full == 0:
            return (first, Factor(rest * (size // full)))
        if full % size == 0 and rest % group == 0:
            return (first, Factor(rest // group))
        smaller = Factor(size, first.axes)
        if full % size == 0 and Layout(axes, [dim], {}) is Layout(axes, [(smaller, Factor(group))], {}):
            return (smaller,)
    if len(dim) > 1 or full % parts or size % parts:
        raise LayoutError(
            f"Dims of sizes {full} and {size} have one letter.",
            why="The blocks of a rank would be different shares of them.",
            fix="Split them by axes whose sizes divide both.",
        )
    return (Factor(size, first.axes),)


def choose_view(layout: Layout, shape: Sequence[int], itemsize: int) -> Choice:
    """The cheapest layout in which a tensor can be viewed in another shape: its own, or one with fewer axes."""
    axes = sorted(layout.sharded)
    for count in range(len(axes) + 1):
        options = []
        for gone in itertools.combinations(axes, count):
            fewer = layout.without(gone)
            try:
                choice = Choice((fewer,), (view(fewer, shape),))
            except LayoutError:
                continue
            plan = None if fewer is layout else plan_redistribute(layout, fewer, itemsize)
            options.append((current_costs().total([plan]), gone, choice))
        if options:
            return min(options, key=lambda option: option[:2])[2]
    raise RuntimeError(f"{layout} cannot be viewed as {tuple(shape)}; please report this bug in shardwise")
