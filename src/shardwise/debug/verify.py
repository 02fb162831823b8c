"""Proving a rule by execution: each way to lay out a call that it allows, against the op on whole tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import axes_of, check_reducible, counting, simulate
from shardwise.debug.differ import difference, shown
from shardwise.debug.draw import draw
from shardwise.debug.parts import BlockError, laid_out, value_of
from shardwise.layout import Factor, Layout, LayoutError, dtype_text, layout_text, view
from shardwise.plan import Choice, every_choice
from shardwise.rules import Proof, RuleError
from shardwise.rules.shape import REGROUPED
from shardwise.rules.table import row_of
from shardwise.tensor.dispatch import dispatch, forget
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.prepare import Met, full_name, meet, row_name, tensors_in
from shardwise.tensor.register import op_overloads

__all__ = ["prove"]

_MESHES = ((2,), (3,), (2, 2))
_MOST_PAIRED = 2  # calls that are tried on two axes, where each thing one axis may do meets each other
_Sample = tuple[Sequence[Any], Mapping[str, Any]]
# What these return is not said by their arguments, only its shape.
_UNSET = {"aten.empty_like.default"}


@dataclass(frozen=True)
class _Case:
    """A call in certain layouts, and what it must give."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    met: Met
    choice: Choice
    mesh: DeviceMesh
    seed: int

    def laid(self) -> tuple[list[DTensor], tuple[Any, ...], dict[str, Any]]:
        """The call's tensors as the choice says, and its arguments with them."""
        rng = torch.Generator().manual_seed(self.seed)
        found = tensors_in([*self.args, *self.kwargs.values()])
        mine = [laid_out(t, o, self.mesh, rng) for t, o in zip(found, self.choice.inputs, strict=True)]
        rest = iter(mine)
        return mine, _with(self.args, rest), _with(self.kwargs, rest)


def prove(op: Any, calls: Sequence[_Sample] | None, examples: int, seed: int) -> Proof:
    """Try all that an op's rule allows; see `shardwise.rules.verify`."""
    func = _named(op) if isinstance(op, str) else _single(op)
    text = _row_text(func)
    some = draw(func, text, examples, seed) if calls is None else calls
    some = sorted(
        some, key=lambda c: sum(t.numel() for t in _tensors(c))
    )  # the first that fails is a small one
    ways = [0] * len(some)
    gradients = pairs = 0
    for shape in _MESHES:
        # two axes at once where one had the most to do
        busy = sorted(range(len(some)), key=lambda n: (-ways[n], n))[:_MOST_PAIRED]
        with simulate(math.prod(shape)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            for number, (args, kwargs) in enumerate(some):
                if len(shape) > 1 and number not in busy:
                    continue
                for case in _cases(func, tuple(args), dict(kwargs), mesh, seed):
                    _check(case, text)
                    ways[number] += len(shape) == 1
                    pairs += len(shape) > 1
                    gradients += shape == _MESHES[0] and _check_gradient(case, text)
            forget()  # recipes of a mesh that is gone
    if not any(ways):
        raise RuleError(
            f"{func} was not tried.",
            why=f"its row, {text!r}, covers none of the {len(some)} calls",
            fix="give it calls=[(args, kwargs), …] that the row is for; a custom op needs register_fake",
        )
    return Proof(str(func), text, sum(map(bool, ways)), sum(ways) + pairs, gradients)


def _named(name: str) -> Any:
    try:
        space, packet, form = name.split(".")
        return getattr(getattr(getattr(torch.ops, space), packet), form)
    except (ValueError, AttributeError) as error:
        raise RuleError(
            f"{name!r} is not the name of an op.", why=str(error), fix="write it like 'aten.mm.default'"
        ) from error


def _single(op: Any) -> Any:
    every = op_overloads(op)
    if len(every) == 1:
        return every[0]
    raise RuleError(
        f"{op} is {len(every)} ops.",
        why="each has a row of its own",
        fix=f"verify one of {', '.join(map(str, every))}",
    )


def _row_text(func: Any) -> str:
    name, in_place = row_name(func)
    row = row_of(full_name(func)) or row_of(name)
    if row is not None:
        return row.text
    if name in REGROUPED and not in_place:
        return "regroups factors"
    raise RuleError(
        f"{func} has no row.", why="it runs on the whole", fix="register_sharding(op, 'm n -> m n') first"
    )


def _tensors(call: _Sample) -> list[Tensor]:
    return tensors_in([*call[0], *call[1].values()])


def _with(value: Any, tensors: Iterator[Any]) -> Any:
    """Arguments with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        return type(value)(_with(v, tensors) for v in value)
    return {k: _with(v, tensors) for k, v in value.items()} if isinstance(value, dict) else value


def _cases(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, seed: int
) -> Iterator[_Case]:
    met = meet(func, args, kwargs, mesh)
    if met is None:
        return
    call, axes = met.call, axes_of(mesh)
    found = tensors_in([*args, *kwargs.values()])
    if met.rule is None:
        every = _views(call.shapes[0], call.outputs[0], mesh)
    else:
        every = every_choice(met.rule, call.shapes, call.outputs, axes)
    for number, choice in enumerate(every):
        said = [o.shape for o in (*choice.inputs, *choice.outputs)]
        if said != [*call.shapes, *call.outputs]:
            raise RuleError(
                f"{func} is not what its row says, {_row_text(func)!r}.",
                why=f"a letter stands for dims of different sizes: {call.shapes} -> {call.outputs} would be {said}",
                fix="use a letter for each",
            )
        if _can_be(found, choice.inputs):
            yield _Case(func, args, kwargs, met, choice, mesh, seed * 1000 + number)


def _can_be(found: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """Whether tensors of these dtypes can be pending so."""
    try:
        for t, layout in zip(found, layouts, strict=True):
            for _, op in layout.partial:
                check_reducible(t.dtype, op)
    except LayoutError:
        return False
    return True


def _views(shape: tuple[int, ...], seen: tuple[int, ...], mesh: DeviceMesh) -> Iterator[Choice]:
    """Layouts that can be seen in another shape: each dim cut, whole or inside, and whatever is pending."""
    axes = axes_of(mesh)
    whole = Layout.replicated(shape, axes)
    some = [whole]
    for axis in range(len(axes)):
        some = [*some, *(cut for layout in some for cut in _cuts(layout, axis))]
    for layout in dict.fromkeys(some):
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


def _check(case: _Case, text: str) -> None:
    """Run a case below autograd, as dispatch does."""
    func, met = case.func, case.met
    found = tensors_in([*case.args, *case.kwargs.values()])
    dense = [t.clone() for t in found]
    rest = iter(dense)
    with torch.no_grad():
        want = _flat(func(*_with(case.args, rest), **_with(case.kwargs, rest)))
        _check_fake(case, want)
        mine, args, kwargs = case.laid()
        try:
            with counting() as ledger:
                got = _flat(dispatch(DTensor, func, (), args, kwargs))
        except Exception as error:
            raise _wrong(case, text, f"raised {type(error).__name__}: {error}") from error
        if ledger.collectives:
            sent = ", ".join(e.step for e in ledger.entries)
            raise _wrong(case, text, f"sent something: {sent}")
        want += [dense[i] for i in met.written]
        got += [mine[i] for i in met.written]
        for number, (g, w) in enumerate(zip(got, want, strict=True)):
            which = f"output {number}" if len(want) > 1 else "the result"
            _compare(case, text, which, g, w)


def _check_fake(case: _Case, want: Sequence[Any]) -> None:
    """What an op says it makes, by its meta kernel, is what it makes."""
    said = [(tuple(t.shape), t.dtype) for t in case.met.made if t is not None]
    made = [(tuple(t.shape), t.dtype) for t in want if isinstance(t, Tensor)]
    if said != made:
        raise RuleError(
            f"{case.func} is not what it says itself.",
            why=f"on {_shapes_text(case)} it makes {made}, and its fake says {said}",
            fix="mend what was given to register_fake, or give calls=[…] that the op is for",
        )


def _shapes_text(case: _Case) -> str:
    found = tensors_in([*case.args, *case.kwargs.values()])
    return ", ".join(f"{dtype_text(t.dtype)}{list(t.shape)}" for t in found)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [x for r in result for x in _flat(r)]
    return [] if result is None else [result]


def _compare(case: _Case, text: str, which: str, got: Any, want: Tensor) -> None:
    has_values = full_name(case.func) not in _UNSET
    try:
        whole = value_of(got, copies=has_values) if isinstance(got, DTensor) else got
    except LayoutError as error:
        raise _wrong(case, text, f"left {which} as {got._spec}, but {error.why}") from error
    except BlockError as error:
        raise _wrong(case, text, f"left {which} as {got._spec}, but {error}") from error
    dtypes = [t.dtype for t in tensors_in([*case.args, *case.kwargs.values()])]
    said = difference(whole, want, values=has_values, coarsest=dtypes)
    if said:
        lies = f", which is {got._spec}" if isinstance(got, DTensor) else ""
        values = () if whole.shape != want.shape else (f"got {shown(whole)}", f"expected {shown(want)}")
        raise _wrong(case, text, f"gave {which}{lies}, as {said}", *values)


def _check_gradient(case: _Case, text: str) -> bool:
    """Compare gradients, where the op has some."""
    found = tensors_in([*case.args, *case.kwargs.values()])
    dense = [t.detach().clone().requires_grad_(_can_have_gradient(t)) for t in found]
    if case.met.written or not any(t.requires_grad for t in dense) or not _knows_gradient(case.func):
        return False
    rest = iter(dense)
    try:
        want = _gradients(_flat(case.func(*_with(case.args, rest), **_with(case.kwargs, rest))), dense, None)
    except Exception:
        return False  # it has no gradient, or not of these arguments
    if want is None:
        return False
    mine, args, kwargs = case.laid()
    for t in mine:
        t.requires_grad_(_can_have_gradient(t))
    try:
        got = _gradients(_flat(case.func(*args, **kwargs)), mine, case.mesh)
    except Exception as error:
        raise _wrong(case, text, f"raised {type(error).__name__} in its gradient: {error}") from error
    for number, (g, w) in enumerate(zip(got or [], want, strict=True)):
        _compare(case, text, f"the gradient of x{number}", g, w)
    return True


def _knows_gradient(func: Any) -> bool:
    """Whether an op has a formula; one without may still be differentiated on plain tensors, through what it runs."""
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def _can_have_gradient(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def _gradients(results: Sequence[Any], inputs: Sequence[Tensor], mesh: DeviceMesh | None) -> Any:
    """The gradients of a drawn weighted sum of the results, zero where one does not matter."""
    outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if not outputs or not leaves:
        return None
    weights: list[Tensor] = []
    for out in outputs:
        w = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
        whole = None if mesh is None else Layout.replicated(w.shape, axes_of(mesh))
        weights.append(w if whole is None else laid_out(w, whole, mesh, torch.Generator()))
    grads = iter(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
    out_grads = [next(grads) if t.requires_grad else None for t in inputs]
    return [
        torch.zeros(t.shape, dtype=t.dtype) if g is None else g
        for g, t in zip(out_grads, inputs, strict=True)
    ]


def _wrong(case: _Case, text: str, what: str, *more: str) -> RuleError:
    """A counterexample: the call, how its tensors lie, and what came of it."""
    found = tensors_in([*case.args, *case.kwargs.values()])
    names = [f"x{i}" for i in range(len(found))]
    stand = iter([_Name(n) for n in names])
    given = [repr(a) for a in _with(case.args, stand)]
    given += [f"{k}={v!r}" for k, v in _with(case.kwargs, stand).items()]
    lines = [f"{case.func}({', '.join(given)}) on a mesh of {axes_of(case.mesh)} {what}"]
    for name, t, layout in zip(names, found, case.choice.inputs, strict=True):
        lines.append(f"{name} is {layout_text(layout, dtype_text(t.dtype))}: {shown(t)}")
    lines += more
    pending = any(i.partial for i in case.choice.inputs)
    fix = (
        "what is pending does not pass: take it out of linear= (or monotone=)"
        if pending
        else "a letter that is split here must be whole: write ! before it, or say by= what its parts are reduced"
    )
    return RuleError(f"{case.func} is not what its row says, {text!r}.", why="\n       ".join(lines), fix=fix)


class _Name(str):
    """A name that shows without quotes."""

    __repr__ = str.__str__
