"""One sample of an op of torch's op_db on a drawn layout, against the dense result and gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.op_db.cheaper import cheaper
from tests.op_db.drawn import distributed, flat, swap
from tests.op_db.excluded import FILLED, excluded
from tests.op_db.rounding import differs, same_up_to_rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.call.trace import TracedCall, trace_calls

__all__ = ["Verdict", "check"]

_SEED = 5


@dataclass
class Verdict:
    """What came of a sample: `right`, `rounded` (right but for rounding), `wrong`, `error` or `skipped`."""

    kind: str
    why: str = ""
    routes: Counter[str] = field(default_factory=Counter)
    cheaper: dict[str, str] = field(default_factory=dict)


def _grads(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


# What is differentiated: all there is to, the input alone where the rest has no derivative, nothing.
_WANTS: tuple[Callable[[int, Tensor], bool], ...] = (
    lambda number, t: _grads(t),
    lambda number, t: number == 0 and _grads(t),
    lambda number, t: False,
)


def _loss(result: Any) -> Tensor | None:
    """A weighted sum of what can be differentiated, with weights that no dtype rounds; None if nothing can."""
    total = None
    for out in flat(result):
        if isinstance(out, Tensor) and out.requires_grad:
            if out.dtype == torch.complex32:  # which torch does not multiply
                out = out.to(torch.complex64)
            weights = (torch.arange(out.numel()) * 5 % 11 - 5.5).view(out.shape).to(out.dtype) / 8
            if isinstance(out, sw.DTensor):
                mesh = out.device_mesh
                weights = sw.distribute_tensor(weights, mesh, [sw.Replicate()] * mesh.ndim)
            term = (out * weights).sum()
            term = term.real if term.dtype.is_complex else term
            total = term if total is None else total + term
    return total


def _evaluated(
    op: Any, sample: Any, put: Callable[[Tensor], Any], wants: Callable[[int, Tensor], bool]
) -> tuple[list[Any], list[Any]]:
    """The results of an op, and the gradients of its inputs (None where there is none)."""
    leaves: list[Any] = []

    def leaf(t: Tensor) -> Any:
        x = put(t)
        leaves.append(x.requires_grad_() if wants(len(leaves), t) else x)
        return x

    i, a, k = swap((sample.input, sample.args, sample.kwargs), leaf)
    with sw.fork_rng(), sw.one_device():
        sw.manual_seed(_SEED)
        result = op(i, *a, **k)
    with torch.no_grad():
        outs = [_whole(out, alike=not excluded(op)) for out in flat(result)]
    loss = _loss(sample.output_process_fn_grad(result))
    if loss is not None:
        loss.backward()
    with torch.no_grad():
        return outs, [None if x.grad is None else _whole(x.grad) for x in leaves]


def _whole(x: Any, alike: bool = True) -> Any:
    """The whole of a result, after holding against each other what the ranks say it is."""
    if isinstance(x, sw.DTensor):
        x = x.detach().full_tensor()
    if not isinstance(x, sw.PerRank):
        return x.detach().clone() if isinstance(x, Tensor) else x
    first, *others = x.ranks
    for other in others if alike else ():
        # not bit for bit: where memory is aligned otherwise, libraries round otherwise
        if why := differs(other, first):
            raise RuntimeError(f"the ranks hold different values of one tensor: {why}")
    return first.detach().clone()


def _dense(op: Any, sample: Any, forward_only: bool) -> tuple[Any, Callable[[int, Tensor], bool]] | None:
    """What the op gives on one device, with gradients of as much as it can; None if it fails there."""
    for wants in _WANTS[2:] if forward_only or not op.supports_autograd else _WANTS:
        state = torch.get_rng_state()
        try:
            return _evaluated(op, sample, lambda t: t.detach().clone(), wants), wants
        except Exception:
            torch.set_rng_state(state)
    return None


def check(op: Any, sample: Any, mesh: sw.DeviceMesh, draw: random.Random, judge: bool = True) -> Verdict:
    """The verdict on one sample, in layouts drawn for it; with a judge of what ran on the whole."""
    forward_only = draw.random() < 0.2  # some kernels are taken only where no gradient is wanted
    found = _dense(op, sample, forward_only)
    if found is None:
        return Verdict("skipped", "the dense op fails")
    (outs, grads), wants = found
    verdict = Verdict("right")
    seen: list[str] = []

    def put(t: Tensor) -> Any:
        x = distributed(t, mesh, draw, pending=op.full_name not in FILLED)
        seen.append(str(x._spec))
        return x

    def watch(call: TracedCall) -> None:
        verdict.routes[call.route] += 1
        if judge and call.route == "fallback" and call.communicates and (how := cheaper(call)):
            verdict.cheaper.setdefault(str(call.op), how)

    try:
        with trace_calls(watch):
            mine, mine_grads = _evaluated(op, sample, put, wants)
    except Exception as error:
        verdict.kind = "error"
        where = f"on {seen} args {_short(sample.args)} {_short(sample.kwargs)}"
        verdict.why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} {where}"
        return verdict
    where = f"on {seen} args {_short(sample.args)} {_short(sample.kwargs)}"
    unset = bool(excluded(op))
    if why := _compared(op, mine, outs, mine_grads, grads, unset):
        rounded = not unset and same_up_to_rounding(
            lambda put: _evaluated(op, sample, put, wants),
            (mine, mine_grads),
            (outs, grads),
            _draws(op, sample),
        )
        verdict.kind, verdict.why = ("rounded" if rounded else "wrong"), f"{why} {where}"
    return verdict


class _Watch(TorchDispatchMode):
    """Whether anything was drawn: what restores the generator afterwards leaves no other trace."""

    drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(op: Any, sample: Any) -> bool:
    """Whether the op draws random numbers."""
    with torch.random.fork_rng(), torch.no_grad(), _Watch() as watch:
        i, a, k = swap((sample.input, sample.args, sample.kwargs), lambda t: t.detach().clone())
        op(i, *a, **k)
    return watch.drew


def _compared(
    op: Any, mine: list[Any], outs: list[Any], my_grads: list[Any], grads: list[Any], unset: bool
) -> str:
    """What differs in results or gradients beyond the tolerance of the dtype; empty if nothing."""
    if len(mine) != len(outs):
        return f"{len(mine)} results, not {len(outs)}"
    for number, (got, want) in enumerate(zip(mine, outs, strict=True)):
        if why := differs(got, want, values=not unset):
            return f"result {number}: {why}"
    for number, (got, want) in enumerate(zip(my_grads, grads, strict=True)):
        if got is None and want is None:
            continue
        zero = torch.zeros_like(got if want is None else want)
        pair = (zero if got is None else got, zero if want is None else want)
        if why := differs(*pair, values=not unset):
            return f"gradient of tensor {number}: {why}"
    return ""


def _short(value: Any) -> str:
    shown = swap(value, lambda t: f"<{str(t.dtype)[6:]} {list(t.shape)}>")
    return str(shown)[:160]
