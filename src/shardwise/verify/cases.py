"""A call in one of the layouts that its rule allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.call.arguments import map_tensors, tensors_in
from shardwise.call.op_call import OpCall
from shardwise.call.resolve import Match, match_rule
from shardwise.call.schema import op_info
from shardwise.comm import axes_of, check_reducible
from shardwise.layout import Factor, Layout, LayoutError, dtype_text, view
from shardwise.plan import Choice, every_choice
from shardwise.rules import Rule, RuleError
from shardwise.rules.table import row_of
from shardwise.rules.tables.view_and_cat import REGROUPED
from shardwise.tensor.dtensor import DTensor
from shardwise.verify.compare import shown
from shardwise.verify.layouts import laid_out

__all__ = ["Case", "PlainCall", "cases", "row_text", "with_tensors"]


@dataclass(frozen=True)
class Case:
    """A call in certain layouts, and what it must give."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    met: Match
    choice: Choice
    mesh: DeviceMesh
    seed: int

    def laid(self) -> tuple[list[DTensor], tuple[Any, ...], dict[str, Any]]:
        """The call's tensors as the choice says, and its arguments with them."""
        rng = torch.Generator().manual_seed(self.seed)
        found = tensors_in([*self.args, *self.kwargs.values()])
        mine = [laid_out(t, o, self.mesh, rng) for t, o in zip(found, self.choice.inputs, strict=True)]
        rest = iter(mine)
        return mine, with_tensors(self.args, rest), with_tensors(self.kwargs, rest)

    def but_alike(self, outputs: Sequence[Any]) -> list[Any]:
        """What is said of outputs, but for those that are taken as they come: by-products, the same on all ranks."""
        alike = self.met.rule.alike if isinstance(self.met.rule, Rule) else frozenset()
        return [o for i, o in enumerate(outputs) if i not in alike]

    def wrong(self, what: str, *more: str) -> RuleError:
        """A counterexample: the call, how its tensors lie, and what came of it."""
        found = tensors_in([*self.args, *self.kwargs.values()])
        names = [f"x{i}" for i in range(len(found))]
        stand = iter([_Name(n) for n in names])
        given = [repr(a) for a in with_tensors(self.args, stand)]
        given += [f"{k}={v!r}" for k, v in with_tensors(self.kwargs, stand).items()]
        lines = [f"{self.func}({', '.join(given)}) on a mesh of {axes_of(self.mesh)} {what}"]
        for name, t, layout in zip(names, found, self.choice.inputs, strict=True):
            lines.append(f"{name} is {layout.text(dtype_text(t.dtype))}: {shown(t)}")
        lines += more
        pending = any(i.partial for i in self.choice.inputs)
        fix = (
            "what is pending does not pass: take it out of linear= (or monotone=)"
            if pending
            else "a letter that is split here must be whole: write ! before it, or say by= what its parts are reduced"
        )
        return RuleError(
            f"{self.func} is not what its row says, {row_text(self.func)!r}.",
            why="\n       ".join(lines),
            fix=fix,
        )


class _Name(str):
    """A name that shows without quotes."""

    __repr__ = str.__str__


def row_text(func: Any) -> str:
    """What the table says of an op, or a user of his."""
    info = op_info(func)
    row = row_of(info.name) or row_of(info.rule_name)
    if row is not None:
        return row.text
    if info.rule_name in REGROUPED and not info.writes:
        return "regroups factors"
    raise RuleError(
        f"{func} has no row.", why="it runs on the whole", fix="register_sharding(op, 'm n -> m n') first"
    )


def with_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """Arguments with other tensors in their places."""
    return map_tensors(lambda t: next(tensors), value)


class PlainCall(OpCall):
    """A call on plain tensors, for the rule on a given mesh."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> None:
        super().__init__(func, args, kwargs)
        self._mesh = mesh

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh


def cases(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, seed: int
) -> Iterator[Case]:
    """A call in all the layouts that its rule allows on a mesh."""
    met = match_rule(PlainCall(func, args, kwargs, mesh))
    if met is None:
        return
    call, axes = met.call, axes_of(mesh)
    returns = op_info(func).returned is not None
    found = tensors_in([*args, *kwargs.values()])
    every: Iterable[Choice]
    if met.creates:
        every = _made(call.shapes, call.outputs, mesh)
    elif met.rule is None:
        every = _views(call.shapes[0], call.outputs[0], mesh)
    else:
        every = every_choice(met.rule, call.shapes, call.outputs, axes)
    for number, choice in enumerate(every):
        if returns and choice.inputs[met.written[0]] is not choice.outputs[0]:
            continue  # what it writes to cannot follow
        said = [o.shape for o in (*choice.inputs, *choice.outputs)]
        if said != [*call.shapes, *call.outputs]:
            raise RuleError(
                f"{func} is not what its row says, {row_text(func)!r}.",
                why=f"a letter stands for dims of different sizes: {call.shapes} -> {call.outputs} would be {said}",
                fix="use a letter for each",
            )
        if _can_be(found, choice.inputs):
            yield Case(func, args, kwargs, met, choice, mesh, seed * 1000 + number)


def _can_be(found: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """Whether tensors of these dtypes can be pending so."""
    try:
        for t, layout in zip(found, layouts, strict=True):
            for _, op in layout.partial:
                check_reducible(t.dtype, op)
    except LayoutError:
        return False
    return True


def _layouts(shape: tuple[int, ...], mesh: DeviceMesh) -> Iterable[Layout]:
    """Ways to lie: each dim cut, whole or inside, and whatever is pending."""
    axes = axes_of(mesh)
    some = [Layout.replicated(shape, axes)]
    for axis in range(len(axes)):
        some = [*some, *(cut for layout in some for cut in _cuts(layout, axis))]
    return dict.fromkeys(some)


def _made(
    shapes: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], mesh: DeviceMesh
) -> Iterator[Choice]:
    """What is made like a tensor, however that one lies."""
    for layout in _layouts(shapes[0], mesh):
        rest = [Layout.replicated(s, layout.axes) for s in shapes[1:]]
        held = layout.with_partial({})
        made = [held if s == held.shape else Layout.replicated(s, layout.axes) for s in outputs]
        yield Choice((layout, *rest), tuple(made))


def _views(shape: tuple[int, ...], seen: tuple[int, ...], mesh: DeviceMesh) -> Iterator[Choice]:
    """Layouts that can be seen in another shape."""
    for layout in _layouts(shape, mesh):
        try:
            yield Choice((layout,), (view(layout, seen),))
        except LayoutError:
            continue  # it must move first, and then it is one of the others


def _cuts(layout: Layout, axis: int) -> Iterator[Layout]:
    for d, dim in enumerate(layout.dims):
        for i, f in enumerate(dim):
            yield layout.with_dim(d, *dim[:i], Factor(f.size, (*f.axes, axis)), *dim[i + 1 :])
        size = layout.shape[d]
        if len(dim) == 1 and not dim[0].axes:
            for n in (n for n in range(2, size) if size % n == 0):
                yield layout.with_dim(d, Factor(n), Factor(size // n, (axis,)))
    for op in ("sum", "avg", "max", "min", "product"):
        try:
            yield layout.with_partial({**dict(layout.partial), axis: op})
        except LayoutError:
            continue  # reductions that do not mix
