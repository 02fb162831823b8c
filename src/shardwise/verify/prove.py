"""Checking a rule by execution: a call in each layout that the rule allows, compared with the op on full tensors."""

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
from shardwise.call.meta import remember_outputs
from shardwise.call.op_call import OpCall
from shardwise.call.schema import op_info
from shardwise.call.value_checks import indexes_nothing
from shardwise.comm import axes_of, counting, simulate
from shardwise.dispatch.router import dispatch
from shardwise.layout import Layout, LayoutError, dtype_text
from shardwise.rules import Proof, RuleError
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.dispatcher import has_derivative
from shardwise.verify.cases import Case, cases, row_text
from shardwise.verify.compare import describe, difference
from shardwise.verify.layouts import BlockError, assemble, distribute
from shardwise.verify.sampling import draw

__all__ = ["prove"]

_MESHES = ((2,), (3,), (2, 2))
_MOST_PAIRED = 2  # calls that run on a mesh of two axes, where the number of layouts is squared
_Sample = tuple[Sequence[Any], Mapping[str, Any]]
# Ops whose results have undefined values.
_UNINITIALIZED = {"aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"}


def prove(op: Any, calls: Sequence[_Sample] | None, examples: int, seed: int) -> Proof:
    """Run an op in every layout that its rule allows; see `shardwise.rules.verify`."""
    func = _by_name(op) if isinstance(op, str) else _overload(op)
    text = row_text(func)
    samples = draw(func, text, examples, seed) if calls is None else calls
    # small ones first, so that the counterexample is small
    samples = sorted(samples, key=lambda c: sum(t.numel() for t in tensors_in([*c[0], *c[1].values()])))
    layouts = [0] * len(samples)
    gradients = pairs = 0
    for shape in _MESHES:
        # on two axes, the calls that had the most layouts on one
        busy = sorted(range(len(samples)), key=lambda n: (-layouts[n], n))[:_MOST_PAIRED]
        with simulate(math.prod(shape)), warnings.catch_warnings(), remember_outputs():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            for number, (args, kwargs) in enumerate(samples):
                if len(shape) > 1 and number not in busy:
                    continue
                for case in cases(func, tuple(args), dict(kwargs), mesh, seed):
                    _check(case)
                    layouts[number] += len(shape) == 1
                    pairs += len(shape) > 1
                    gradients += shape == _MESHES[0] and _check_gradient(case)
    if not any(layouts):
        raise RuleError(
            f"{func} was not run.",
            why=f"Its row, {text!r}, covers none of the {len(samples)} calls.",
            fix="verify(op, calls=[(args, kwargs), ...]) with calls that it covers; a custom op needs register_fake.",
        )
    return Proof(str(func), text, sum(map(bool, layouts)), sum(layouts) + pairs, gradients)


def _by_name(name: str) -> Any:
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise RuleError(
            f"{name!r} is not the name of an op.", why=f"{error}.", fix="verify('aten.mm.default')"
        ) from error


def _overload(op: Any) -> Any:
    overloads = op_overloads(op)
    if len(overloads) == 1:
        return overloads[0]
    raise RuleError(
        f"{op} has {len(overloads)} overloads.",
        why="Each overload has its own row.",
        fix=f"Verify one of {', '.join(map(str, overloads))}.",
    )


def _check(case: Case) -> None:
    """Run a case below autograd, as dispatch does, and compare the results with those on full tensors."""
    func, written = case.func, case.match.written
    dense = [t.clone() for t in case.tensors]
    with torch.no_grad():
        args, kwargs = case.arguments(dense)
        want = _flatten(func(*args, **kwargs))
        _check_fake(case, want)
        mine = case.distribute()
        args, kwargs = case.arguments(mine)
        by_row = not indexes_nothing(OpCall(func, args, kwargs))  # else the op runs on full tensors
        try:
            with counting() as ledger:
                got = _flatten(dispatch(func, (), args, kwargs))
        except Exception as error:
            raise case.counterexample(f"raised {type(error).__name__}: {error}") from error
        if by_row and ledger.collectives:
            sent = ", ".join(e.step for e in ledger.entries)
            raise case.counterexample(f"communicated: {sent}")
        layouts = tuple(g._spec.layout for g in got if isinstance(g, DTensor))
        if by_row and case.determined(layouts) != case.determined(case.choice.outputs):
            raise case.counterexample(f"returned {layouts}, where its row gives {case.choice.outputs}")
        want += [dense[i] for i in written]
        got += [mine[i] for i in written]
        for number, (g, w) in enumerate(zip(got, want, strict=True)):
            which = f"output {number}" if len(want) > 1 else "the result"
            _compare(case, which, g, w)


def _check_fake(case: Case, want: Sequence[Any]) -> None:
    """Compare the outputs of the meta kernel with those of the op."""
    inferred, actual = (
        case.determined([(tuple(t.shape), t.dtype) for t in ts if isinstance(t, Tensor)])
        for ts in (case.match.outputs, want)
    )
    if inferred != actual:
        inputs = ", ".join(f"{dtype_text(t.dtype)}{list(t.shape)}" for t in case.tensors)
        raise RuleError(
            f"{case.func} does not agree with its fake kernel.",
            why=f"For {inputs} it returns {actual}, and its fake kernel {inferred}.",
            fix="Correct the function that was given to register_fake, or verify(op, calls=[...]) with valid calls.",
        )


def _flatten(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [x for r in result for x in _flatten(r)]
    return [] if result is None else [result]


def _compare(case: Case, which: str, got: Any, want: Tensor) -> None:
    has_values = op_info(case.func).name not in _UNINITIALIZED
    try:
        full = assemble(got, check_copies=has_values) if isinstance(got, DTensor) else got
    except (BlockError, LayoutError) as error:
        reason = error.why if isinstance(error, LayoutError) else error
        raise case.counterexample(f"returned {which} as {got._spec}, but {reason}") from error
    dtypes = [t.dtype for t in case.tensors]
    found = difference(full, want, values=has_values, coarsest=dtypes)
    if found:
        layout = f", which is {got._spec}" if isinstance(got, DTensor) else ""
        values = () if full.shape != want.shape else (f"got {describe(full)}", f"expected {describe(want)}")
        raise case.counterexample(f"gave {which}{layout}, as {found}", *values)


def _check_gradient(case: Case) -> bool:
    """Compare gradients; False if the op has none."""
    dense = [t.detach().clone().requires_grad_(_can_have_gradient(t)) for t in case.tensors]
    if case.match.written or not any(t.requires_grad for t in dense) or not has_derivative(case.func):
        return False
    args, kwargs = case.arguments(dense)
    try:
        want = _gradients(_flatten(case.func(*args, **kwargs)), dense, None)
    except Exception:
        return False  # not differentiable for these arguments
    if want is None:
        return False
    mine = [t.requires_grad_(_can_have_gradient(t)) for t in case.distribute()]
    args, kwargs = case.arguments(mine)
    try:
        got = _gradients(_flatten(case.func(*args, **kwargs)), mine, case.mesh)
    except Exception as error:
        raise case.counterexample(f"raised {type(error).__name__} in its backward pass: {error}") from error
    for number, (g, w) in enumerate(zip(got or [], want, strict=True)):
        _compare(case, f"the gradient of x{number}", g, w)
    return True


def _can_have_gradient(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def _gradients(results: Sequence[Any], inputs: Sequence[Tensor], mesh: DeviceMesh | None) -> Any:
    """The gradients of a weighted sum of the results, zero for inputs that it does not depend on; None without any."""
    outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if not outputs or not leaves:
        return None
    weights: list[Tensor] = []
    for out in outputs:
        w = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
        if mesh is not None:
            w = distribute(w, Layout.replicated(w.shape, axes_of(mesh)), mesh, torch.Generator())
        weights.append(w)
    grads = iter(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
    out_grads = [next(grads) if t.requires_grad else None for t in inputs]
    return [
        torch.zeros(t.shape, dtype=t.dtype) if g is None else g
        for g, t in zip(out_grads, inputs, strict=True)
    ]
