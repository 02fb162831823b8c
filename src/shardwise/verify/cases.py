"""Cases: a call in each of the layouts that its rule allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import tensors_in, with_tensors
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Match, match_rule
from shardwise.call.schema import op_info
from shardwise.comm import axes_of, check_reducible
from shardwise.layout import REDUCE_OPS, Factor, Layout, LayoutError, dtype_text, view
from shardwise.plan import Choice, every_choice
from shardwise.rules import Rule, RuleError
from shardwise.rules.table import row_of
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.tensor.dtensor import DTensor
from shardwise.verify.compare import describe
from shardwise.verify.layouts import distribute

__all__ = ["Case", "PlainCall", "cases", "row_text"]


@dataclass(frozen=True)
class Case:
    """A call of an op on plain tensors, its rule, and the layouts to run it in."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    match: Match
    choice: Choice
    mesh: DeviceMesh
    seed: int

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The plain tensors of the call."""
        return tensors_in([*self.args, *self.kwargs.values()])

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in place of the plain ones."""
        rest = iter(tensors)
        return with_tensors(self.args, rest), with_tensors(self.kwargs, rest)

    def distribute(self) -> list[DTensor]:
        """The tensors of the call in the layouts of the choice."""
        rng = torch.Generator().manual_seed(self.seed)
        pairs = zip(self.tensors, self.choice.inputs, strict=True)
        return [distribute(t, layout, self.mesh, rng) for t, layout in pairs]

    def determined(self, outputs: Sequence[Any]) -> list[Any]:
        """The entries of those outputs whose layouts follow from the rule; others are the same on all ranks."""
        alike = self.match.rule.alike if isinstance(self.match.rule, Rule) else frozenset()
        return [o for i, o in enumerate(outputs) if i not in alike]

    def counterexample(self, outcome: str, *more: str) -> RuleError:
        """The error that shows the call, the layouts of its tensors and the wrong outcome."""
        names = [f"x{i}" for i in range(len(self.tensors))]
        args, kwargs = self.arguments([_Name(n) for n in names])
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        lines = [f"{self.func}({given}) on a mesh of {axes_of(self.mesh)} {outcome}"]
        for name, t, layout in zip(names, self.tensors, self.choice.inputs, strict=True):
            lines.append(f"{name} is {layout.text(dtype_text(t.dtype))}: {describe(t)}")
        if any(layout.partial for layout in self.choice.inputs):
            fix = "The op is not linear (or monotone) in these arguments: remove them from linear= (or monotone=)."
        else:
            fix = "A letter that is split here must not be: write ! before it, or pass its reduction as by=."
        return _contradiction(self.func, "\n       ".join([*lines, *more]), fix)


class _Name(str):
    """A name that is shown without quotes."""

    __repr__ = str.__str__


def _contradiction(func: Any, why: str, fix: str) -> RuleError:
    return RuleError(f"{func} does not agree with its row, {row_text(func)!r}.", why=why, fix=fix)


def row_text(func: Any) -> str:
    """The text of an op's row, built in or registered."""
    info = op_info(func)
    row = row_of(info.name) or row_of(info.rule_name)
    if row is not None:
        return row.text
    if info.rule_name in REGROUPED and not info.writes:
        return "regroups factors"
    raise RuleError(
        f"{func} has no row.",
        why="There is nothing to verify: it runs on gathered tensors.",
        fix="register_sharding(op, 'm n -> m n')",
    )


class PlainCall(OpCall):
    """A call on plain tensors, to be matched with its rule on a given mesh."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> None:
        super().__init__(func, args, kwargs)
        self._mesh = mesh

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh


def cases(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, seed: int
) -> Iterator[Case]:
    """A call in all layouts that its rule allows on a mesh."""
    match = match_rule(PlainCall(func, args, kwargs, mesh))
    if match is None:
        return
    call = match.call
    choices: Iterable[Choice]
    if match.creates:
        choices = _creations(call.shapes, call.outputs, mesh, match.keeps_pending)
    elif match.rule is None:
        choices = _views(call.shapes[0], call.outputs[0], mesh)
    else:
        choices = every_choice(match.rule, call.shapes, call.outputs, axes_of(mesh))
    returns_written = op_info(func).returned is not None
    for number, choice in enumerate(choices):
        if returns_written and choice.inputs[match.written[0]] is not choice.outputs[0]:
            continue  # a tensor that is written in place keeps its layout
        shapes = [layout.shape for layout in (*choice.inputs, *choice.outputs)]
        if shapes != [*call.shapes, *call.outputs]:
            why = f"One letter stands for dims of different sizes: {call.shapes} -> {call.outputs} would be {shapes}."
            raise _contradiction(func, why, "Use a letter for each of these dims.")
        case = Case(func, args, kwargs, match, choice, mesh, seed * 1000 + number)
        if _can_have_layouts(case.tensors, choice.inputs):
            yield case


def _can_have_layouts(tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """Whether the dtypes of the tensors allow the pending reductions of the layouts."""
    try:
        for t, layout in zip(tensors, layouts, strict=True):
            for _, op in layout.partial:
                check_reducible(t.dtype, op)
    except LayoutError:
        return False
    return True


def _layouts(shape: tuple[int, ...], mesh: DeviceMesh) -> Iterable[Layout]:
    """Layouts of all kinds: dims split as a whole or by an inner factor, and all pending reductions."""
    axes = axes_of(mesh)
    layouts = [Layout.replicated(shape, axes)]
    for axis in range(len(axes)):
        layouts += [new for layout in layouts for new in _with_axis(layout, axis)]
    return dict.fromkeys(layouts)


def _creations(
    shapes: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    mesh: DeviceMesh,
    keeps_pending: bool,
) -> Iterator[Choice]:
    """The choices of an op that creates tensors like its first argument: they get its layout."""
    for layout in _layouts(shapes[0], mesh):
        rest = [Layout.replicated(s, layout.axes) for s in shapes[1:]]
        like = layout if keeps_pending else layout.with_partial({})
        created = [like if s == like.shape else Layout.replicated(s, layout.axes) for s in outputs]
        yield Choice((layout, *rest), tuple(created))


def _views(shape: tuple[int, ...], target: tuple[int, ...], mesh: DeviceMesh) -> Iterator[Choice]:
    """The layouts of a shape that can be viewed as another shape without moving data."""
    for layout in _layouts(shape, mesh):
        try:
            yield Choice((layout,), (view(layout, target),))
        except LayoutError:
            continue  # it is redistributed first, to one of the other layouts


def _with_axis(layout: Layout, axis: int) -> Iterator[Layout]:
    """The layout with one more axis in use."""
    for d, dim in enumerate(layout.dims):
        for i, f in enumerate(dim):
            yield layout.with_dim(d, *dim[:i], Factor(f.size, (*f.axes, axis)), *dim[i + 1 :])
        size = layout.shape[d]
        if len(dim) == 1 and not dim[0].axes:
            for n in (n for n in range(2, size) if size % n == 0):
                yield layout.with_dim(d, Factor(n), Factor(size // n, (axis,)))
    for op in REDUCE_OPS:
        try:
            yield layout.with_partial({**dict(layout.partial), axis: op})
        except LayoutError:
            continue  # reductions of different kinds do not commute
