"""Proving a rule by execution: each way to lay out a call that it allows, against the op on whole tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.api.register_sharding import op_overloads
from shardwise.call.arguments import tensors_in
from shardwise.call.schema import op_info
from shardwise.comm import axes_of, counting, simulate
from shardwise.dispatch.router import dispatch
from shardwise.layout import Layout, LayoutError, dtype_text
from shardwise.plan.settings import forget_decisions
from shardwise.rules import Proof, RuleError
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import has_derivative
from shardwise.verify.cases import Case, cases, row_text, with_tensors
from shardwise.verify.compare import difference, shown
from shardwise.verify.layouts import BlockError, laid_out, value_of
from shardwise.verify.sampling import draw

__all__ = ["prove"]

_MESHES = ((2,), (3,), (2, 2))
_MOST_PAIRED = 2  # calls that are tried on two axes, where each thing one axis may do meets each other
_Sample = tuple[Sequence[Any], Mapping[str, Any]]
# What these return is not said by their arguments, only its shape.
_UNSET = {"aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"}


def prove(op: Any, calls: Sequence[_Sample] | None, examples: int, seed: int) -> Proof:
    """Try all that an op's rule allows; see `shardwise.rules.verify`."""
    func = _named(op) if isinstance(op, str) else _single(op)
    text = row_text(func)
    some = draw(func, text, examples, seed) if calls is None else calls
    # the first that fails is a small one
    some = sorted(some, key=lambda c: sum(t.numel() for t in tensors_in([*c[0], *c[1].values()])))
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
                for case in cases(func, tuple(args), dict(kwargs), mesh, seed):
                    _check(case)
                    ways[number] += len(shape) == 1
                    pairs += len(shape) > 1
                    gradients += shape == _MESHES[0] and _check_gradient(case)
            forget_decisions()  # recipes of a mesh that is gone
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


def _check(case: Case) -> None:
    """Run a case below autograd, as dispatch does."""
    func, met = case.func, case.met
    found = tensors_in([*case.args, *case.kwargs.values()])
    dense = [t.clone() for t in found]
    rest = iter(dense)
    with torch.no_grad():
        want = _flat(func(*with_tensors(case.args, rest), **with_tensors(case.kwargs, rest)))
        _check_fake(case, want)
        mine, args, kwargs = case.laid()
        try:
            with counting() as ledger:
                got = _flat(dispatch(func, (), args, kwargs))
        except Exception as error:
            raise case.wrong(f"raised {type(error).__name__}: {error}") from error
        if ledger.collectives:
            sent = ", ".join(e.step for e in ledger.entries)
            raise case.wrong(f"sent something: {sent}")
        lies = tuple(g._spec.layout for g in got if isinstance(g, DTensor))
        if case.but_alike(lies) != case.but_alike(case.choice.outputs):
            raise case.wrong(f"made {lies}, and its row says {case.choice.outputs}")
        want += [dense[i] for i in met.written]
        got += [mine[i] for i in met.written]
        for number, (g, w) in enumerate(zip(got, want, strict=True)):
            which = f"output {number}" if len(want) > 1 else "the result"
            _compare(case, which, g, w)


def _check_fake(case: Case, want: Sequence[Any]) -> None:
    """What an op says it makes, by its meta kernel, is what it makes."""
    said, made = (
        case.but_alike([(tuple(t.shape), t.dtype) for t in ts if isinstance(t, Tensor)])
        for ts in (case.met.outputs, want)
    )
    if said != made:
        raise RuleError(
            f"{case.func} is not what it says itself.",
            why=f"on {_shapes_text(case)} it makes {made}, and its fake says {said}",
            fix="mend what was given to register_fake, or give calls=[…] that the op is for",
        )


def _shapes_text(case: Case) -> str:
    found = tensors_in([*case.args, *case.kwargs.values()])
    return ", ".join(f"{dtype_text(t.dtype)}{list(t.shape)}" for t in found)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [x for r in result for x in _flat(r)]
    return [] if result is None else [result]


def _compare(case: Case, which: str, got: Any, want: Tensor) -> None:
    has_values = op_info(case.func).name not in _UNSET
    try:
        whole = value_of(got, copies=has_values) if isinstance(got, DTensor) else got
    except LayoutError as error:
        raise case.wrong(f"left {which} as {got._spec}, but {error.why}") from error
    except BlockError as error:
        raise case.wrong(f"left {which} as {got._spec}, but {error}") from error
    dtypes = [t.dtype for t in tensors_in([*case.args, *case.kwargs.values()])]
    said = difference(whole, want, values=has_values, coarsest=dtypes)
    if said:
        lies = f", which is {got._spec}" if isinstance(got, DTensor) else ""
        values = () if whole.shape != want.shape else (f"got {shown(whole)}", f"expected {shown(want)}")
        raise case.wrong(f"gave {which}{lies}, as {said}", *values)


def _check_gradient(case: Case) -> bool:
    """Compare gradients, where the op has some."""
    found = tensors_in([*case.args, *case.kwargs.values()])
    dense = [t.detach().clone().requires_grad_(_can_have_gradient(t)) for t in found]
    if case.met.written or not any(t.requires_grad for t in dense) or not has_derivative(case.func):
        return False
    rest = iter(dense)
    try:
        want = _gradients(
            _flat(case.func(*with_tensors(case.args, rest), **with_tensors(case.kwargs, rest))), dense, None
        )
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
        raise case.wrong(f"raised {type(error).__name__} in its gradient: {error}") from error
    for number, (g, w) in enumerate(zip(got or [], want, strict=True)):
        _compare(case, f"the gradient of x{number}", g, w)
    return True


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
        if mesh is not None:
            w = laid_out(w, Layout.replicated(w.shape, axes_of(mesh)), mesh, torch.Generator())
        weights.append(w)
    grads = iter(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
    out_grads = [next(grads) if t.requires_grad else None for t in inputs]
    return [
        torch.zeros(t.shape, dtype=t.dtype) if g is None else g
        for g, t in zip(out_grads, inputs, strict=True)
    ]
