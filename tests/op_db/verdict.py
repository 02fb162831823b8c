"""Compare one sample of torch's op_db, in random layouts, with the dense results and gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.op_db.excluded import FILLED, excluded
from tests.op_db.missed_splits import find_missed_split
from tests.op_db.random_layouts import distribute_randomly, flat, map_tensors
from tests.op_db.rounding import differs, same_up_to_rounding, widened
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.call.trace import TracedCall, trace_calls

__all__ = ["Verdict", "check"]

_SEED = 5


@dataclass
class Verdict:
    """The outcome of a sample: `right`, `rounded` (equal up to rounding), `wrong`, `error`, or `skipped` (the dense op fails)."""

    kind: str
    why: str = ""
    routes: Counter[str] = field(default_factory=Counter)
    missed_splits: dict[str, str] = field(default_factory=dict)


def _is_differentiable(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


# Which inputs require gradients: all, the first alone if the others have no derivative, none.
_REQUIRES_GRAD: tuple[Callable[[int, Tensor], bool], ...] = (
    lambda number, t: _is_differentiable(t),
    lambda number, t: number == 0 and _is_differentiable(t),
    lambda number, t: False,
)


def _loss(result: Any) -> Tensor | None:
    """A weighted sum of the differentiable outputs, with weights that are exact in every dtype; None without any."""
    total = None
    for out in flat(result):
        if isinstance(out, Tensor) and out.requires_grad:
            if out.dtype == torch.complex32:  # torch has no product of these
                out = out.to(torch.complex64)
            weights = (torch.arange(out.numel()) * 5 % 11 - 5.5).view(out.shape).to(out.dtype) / 8
            if isinstance(out, sw.DTensor):
                mesh = out.device_mesh
                weights = sw.distribute_tensor(weights, mesh, [sw.Replicate()] * mesh.ndim)
            term = (out * weights).sum()
            term = term.real if term.dtype.is_complex else term
            total = term if total is None else total + term
    return total


def _evaluate(
    op: Any, sample: Any, put: Callable[[Tensor], Any], requires_grad: Callable[[int, Tensor], bool]
) -> tuple[list[Any], list[Any]]:
    """The results of an op, and the gradients of its inputs (None where there is none)."""
    leaves: list[Any] = []

    def leaf(t: Tensor) -> Any:
        x = put(t)
        leaves.append(x.requires_grad_() if requires_grad(len(leaves), t) else x)
        return x

    i, a, k = map_tensors((sample.input, sample.args, sample.kwargs), leaf)
    with sw.fork_rng(), sw.one_device():
        sw.manual_seed(_SEED)
        result = op(i, *a, **k)
    with torch.no_grad():
        outs = [_full(out, same=not excluded(op)) for out in flat(result)]
    loss = _loss(sample.output_process_fn_grad(result))
    if loss is not None:
        loss.backward()
    with torch.no_grad():
        return outs, [None if x.grad is None else _full(x.grad) for x in leaves]


def _full(x: Any, same: bool = True) -> Any:
    """The full value of a result, after a check that all ranks have the same."""
    if isinstance(x, sw.DTensor):
        x = x.detach().full_tensor()
    if not isinstance(x, sw.PerRank):
        return x.detach().clone() if isinstance(x, Tensor) else x
    first, *others = x.ranks
    for other in others if same else ():
        # not bitwise: libraries round differently for differently aligned memory
        if why := differs(other, first):
            raise RuntimeError(f"the ranks hold different values of one tensor: {why}")
    return first.detach().clone()


def _dense(op: Any, sample: Any, forward_only: bool) -> tuple[Any, Callable[[int, Tensor], bool]] | None:
    """Results and gradients on one device, for as many inputs as have gradients; None if the op fails there."""
    for requires_grad in _REQUIRES_GRAD[2:] if forward_only or not op.supports_autograd else _REQUIRES_GRAD:
        state = torch.get_rng_state()
        try:
            return _evaluate(op, sample, lambda t: t.detach().clone(), requires_grad), requires_grad
        except Exception:
            torch.set_rng_state(state)
    return None


def check(
    op: Any, sample: Any, mesh: sw.DeviceMesh, draw: random.Random, find_splits: bool = True
) -> Verdict:
    """Compare one sample in random layouts; `find_splits` looks for splits that a fallback could have kept."""
    forward_only = draw.random() < 0.2  # some kernels run only if no input requires gradients
    found = _dense(op, sample, forward_only)
    if found is None:
        return Verdict("skipped", "the dense op fails")
    (outs, grads), requires_grad = found
    verdict = Verdict("right")
    state = draw.getstate()
    specs: list[str] = []

    def put(t: Tensor) -> Any:
        x = distribute_randomly(t, mesh, draw, pending=op.full_name not in FILLED)
        specs.append(str(x._spec))
        return x

    def listen(call: TracedCall) -> None:
        verdict.routes[call.route] += 1
        if (
            find_splits
            and call.route == "fallback"
            and call.communicates
            and (how := find_missed_split(call))
        ):
            verdict.missed_splits.setdefault(str(call.op), how)

    try:
        with trace_calls(listen):
            mine, mine_grads = _evaluate(op, sample, put, requires_grad)
    except Exception as error:
        verdict.kind = "error"
        where = f"on {specs} args {_short(sample.args)} {_short(sample.kwargs)}"
        verdict.why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} {where}"
        return verdict
    where = f"on {specs} args {_short(sample.args)} {_short(sample.kwargs)}"
    uninitialized = bool(excluded(op))
    if why := _difference(op, mine, outs, mine_grads, grads, uninitialized):
        draws = _draws(op, sample)
        rounded = not uninitialized and same_up_to_rounding(
            lambda put: _evaluate(op, sample, put, requires_grad), (mine, mine_grads), (outs, grads), draws
        )
        if draws and not rounded and not uninitialized:
            draw.setstate(state)
            rounded = _is_right_in_wide_dtype(op, sample, put, requires_grad)
        verdict.kind, verdict.why = ("rounded" if rounded else "wrong"), f"{why} {where}"
    return verdict


def _is_right_in_wide_dtype(
    op: Any, sample: Any, put: Callable[[Tensor], Any], requires_grad: Callable[[int, Tensor], bool]
) -> bool:
    """Whether an op is right in the same layouts where rounding does not matter.

    The trials of an op that draws numbers run in its own dtype, and miss that a rounded score decides a softmax.
    """
    found = [
        _evaluate(op, sample, lambda t, put=put: put(widened(t)), requires_grad)  # type: ignore[misc]
        for put in (put, lambda t: t)
    ]
    return not _difference(op, found[0][0], found[1][0], found[0][1], found[1][1], False)


class _RandomOps(TorchDispatchMode):
    """Whether a random op ran; the state of the generator does not show it where torch restores that."""

    drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(op: Any, sample: Any) -> bool:
    """Whether the op draws random numbers."""
    with torch.random.fork_rng(), torch.no_grad(), _RandomOps() as mode:
        i, a, k = map_tensors((sample.input, sample.args, sample.kwargs), lambda t: t.detach().clone())
        op(i, *a, **k)
    return mode.drew


def _difference(
    op: Any, mine: list[Any], outs: list[Any], my_grads: list[Any], grads: list[Any], uninitialized: bool
) -> str:
    """The difference of results or gradients beyond the tolerance of the dtype, as text; empty if there is none."""
    if len(mine) != len(outs):
        return f"{len(mine)} results, not {len(outs)}"
    for number, (got, want) in enumerate(zip(mine, outs, strict=True)):
        if why := differs(got, want, values=not uninitialized):
            return f"result {number}: {why}"
    for number, (got, want) in enumerate(zip(my_grads, grads, strict=True)):
        if got is None and want is None:
            continue
        zero = torch.zeros_like(got if want is None else want)
        pair = (zero if got is None else got, zero if want is None else want)
        if why := differs(*pair, values=not uninitialized):
            return f"gradient of tensor {number}: {why}"
    return ""


def _short(value: Any) -> str:
    shown = map_tensors(value, lambda t: f"<{str(t.dtype)[6:]} {list(t.shape)}>")
    return str(shown)[:160]
