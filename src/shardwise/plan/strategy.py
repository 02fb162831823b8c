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
    cut,
    largest_block,
    view,
)
from shardwise.plan.cost import CostModel
from shardwise.plan.redistribute import plan_redistribute
from shardwise.plan.settings import current_costs
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
    model: CostModel | None = None,
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
        model: the cost model, by default the current one.
        kept: inputs that may not move, because the op writes to them.
    """
    model = model or current_costs()
    found: list[tuple[tuple[float, int, int, int], Choice]] = []
    for number, (guess, choice) in enumerate(_choices(rule, layouts, outputs, itemsizes, model)):
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
        seconds = model.total(plan_redistribute(a, b, n, model) for a, b, n in pairs if a is not b)
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
    return rule.empty or not any(_has_empty(layout) for layout in choice.inputs)


def every_choice(
    rule: Rule | Listed, shapes: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], axes: Axes
) -> Iterator[Choice]:
    """All that a rule allows on a mesh, whatever lies where: what a proof of the rule must try."""
    layouts = [Layout.replicated(s, axes) for s in shapes]
    if isinstance(rule, Listed):
        combinations = itertools.product(rule.candidates, repeat=len(axes))
        found = [_listed(layouts, outputs, chosen) for chosen in combinations]
    else:
        letters = dict.fromkeys(x for said in rule.inputs for x in said if x is not None)
        roles = [_Role(letter=x) for x in letters]
        roles += [_Role(op=op, inputs=group) for group in rule.linear for op in ("sum", "avg")]
        roles += [_Role(op=op, inputs=frozenset({i})) for op in rule.monotone for i in range(len(shapes))]
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
    rule: Rule | Listed,
    layouts: Sequence[Layout],
    outputs: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    model: CostModel,
) -> Iterator[tuple[float, Choice | None]]:
    """The choices of a rule with their estimated cost, cheapest first."""
    blocks = [largest_block(t) * n for t, n in zip(layouts, itemsizes, strict=True)]
    placements = [t.placements for t in layouts]

    def cost(axis: int, wanted: Sequence[Placement]) -> tuple[float, int]:
        """What moving every input to its placement on one axis costs, and how many inputs it changes."""
        on, seconds, changed = layouts[0].axes, 0.0, 0
        for here, there, size in zip(placements, wanted, blocks, strict=True):
            seconds += _axis_seconds(here[axis], there, size, on, axis, model)
            changed += here[axis] != there
        return seconds, changed

    if isinstance(rule, Listed):
        options = [
            [(cost(a, c.inputs) if n > 1 else (0.0, 0), c) for c in rule.candidates]
            for a, n in enumerate(layouts[0].axes.sizes)
        ]
        for guess, candidates in _cheapest_combinations(options):
            yield guess, _listed(layouts, outputs, candidates)
    else:
        roles = [
            [(cost(a, _placements_of(rule, role)), role) for role in _roles(rule, layouts, a)]
            for a in range(len(layouts[0].axes))
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
    """An estimate of changing a tensor's placement on one axis, from the bytes of its largest block; 0 if it is free."""
    if here.is_replicate() or (here.is_partial() and there.is_partial()):
        return 0.0
    if isinstance(here, Shard) and isinstance(there, Shard) and here.dim == there.dim:
        return 0.0
    n = on.sizes[axis]
    latency, bandwidth = model.pace(on, (axis,))
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


def _roles(rule: Rule, layouts: Sequence[Layout], axis: int) -> list[_Role]:
    """The roles of an axis that the operands suggest, and last the one that does nothing."""
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
            elif op is not None and op in rule.monotone:
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

    def dims(said: Letters, shape: Sequence[int]) -> list[Dim]:
        return [
            _of_size(dim_of[x], n, axes) if x in dim_of else (Factor(n),)
            for x, n in zip(said, shape, strict=True)
        ]

    passed = {a: rule.monotone.get(r.op, r.op) for a, r in enumerate(roles) if r.op is not None}
    reduced = {a: r.letter for a, r in enumerate(roles) if r.letter is not None and r.letter in rule.reduced}

    def parts(i: int) -> dict[int, str]:
        out = {a: r.op for a, r in enumerate(roles) if r.op is not None and i in r.inputs}
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


def choose_view(
    layout: Layout, shape: Sequence[int], itemsize: int, model: CostModel | None = None
) -> Choice:
    """The cheapest layout in which a tensor can be viewed in another shape: its own, or one with fewer axes."""
    model = model or current_costs()
    axes = sorted(layout.sharded)
    for count in range(len(axes) + 1):
        options = []
        for gone in itertools.combinations(axes, count):
            fewer = layout.without(gone)
            try:
                choice = Choice((fewer,), (view(fewer, shape),))
            except LayoutError:
                continue
            seconds = (
                0.0 if fewer is layout else model.total([plan_redistribute(layout, fewer, itemsize, model)])
            )
            options.append((seconds, gone, choice))
        if options:
            return min(options, key=lambda option: option[:2])[2]
    raise RuntimeError(f"{layout} cannot be viewed as {tuple(shape)}; please report this bug in shardwise")
