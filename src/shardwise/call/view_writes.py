"""Writes to views with memory of their own: what they send, and those that must run on the memory of the base.

The views are those of `call/moved_view.py`; `_source` says how one is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.call.arguments import replace_tensors
from shardwise.call.fallback import gather
from shardwise.call.op_call import OpCall
from shardwise.call.overlap import is_repeated
from shardwise.call.strides import may_overlap
from shardwise.call.view_scatter import COMPUTED
from shardwise.comm import first_rank, map_ranks
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import announce

__all__ = ["announce_write", "overlaps_itself", "run_on_memory"]

aten = torch.ops.aten


def overlaps_itself(view: DTensor) -> bool:
    """Whether an op on a view must run on the memory of its base, because the view has elements of it more than once.

    Not where the view is written by an op that runs in the place of another one, which writes back; an expanded view is handled
    where its route is chosen, and torch's kernels do not read lazy bits there. A view with lazy bits has them in memory, too:
    there torch computes its values, runs the op on these, and copies all of them back.
    """
    source = view._source
    if source is None or source.is_held or not may_overlap(view.shape, view.stride()):
        return False
    return not is_repeated(view)


def run_on_memory(call: OpCall, target: DTensor) -> Any:
    """Run an op that writes to a view in which elements of memory occur more than once, as on one device.

    The op may write to one of them only, so what is in the view afterwards would not say what is in memory.
    """
    func, source = call.func, target._source
    if source is None:
        raise RuntimeError(f"{func} wrote to {target._spec}, which is not a view.")
    # the write is announced, and the others are small beside it
    with torch.no_grad(), override_settings(implicit="allow"):
        full = {id(t): gather(func, t) for t in call.tensors if isinstance(t, DTensor) and t is not target}

        def write(view: Tensor) -> None:
            memory = map_ranks(_memory, view)
            value = map_ranks(_value, view)
            views = {**full, id(target): value}
            map_ranks(func, *replace_tensors(call.args, views), **replace_tensors(call.kwargs, views))
            if first_rank(value) is not first_rank(view):
                bits = _bits(first_rank(view))
                map_ranks(lambda m, v: m.copy_(_converted(v, bits)), memory, value)

        source.write_as(write)
    return target if call.info.returns else None


def _bits(view: Tensor) -> tuple[bool, bool]:
    """Whether a plain tensor is conjugated, and whether it is negated, when it is read."""
    return view.is_conj(), view.is_neg()


def _memory(view: Tensor) -> Tensor:
    """What a plain tensor has in memory: the same without lazy bits."""
    conj, neg = _bits(view)
    view = view.conj() if conj else view
    return aten._neg_view.default(view) if neg else view


def _value(view: Tensor) -> Tensor:
    """The value of a plain tensor: itself, or a copy if it has lazy bits, which kernels do not read here."""
    return _converted(_memory(view).clone(), _bits(view)) if any(_bits(view)) else view


def _converted(x: Tensor, bits: tuple[bool, bool]) -> Tensor:
    """What is in memory as the value of a tensor with these lazy bits, or the other way round."""
    conj, neg = bits
    x = x.conj_physical() if conj else x
    return x.neg() if neg else x


def announce_write(func: Any, view: DTensor) -> None:
    """Apply the policy before an op writes to a view: afterwards the value must go back to the base."""
    source = view._source
    if source is None or _is_local(source):
        return
    announce(
        func,
        view.numel() * view.dtype.itemsize,
        f"It writes to a view whose data had to move, so the value goes back to its base, {source.base._spec}.",
        "Write to the base, or to a view along dims that are not split",
    )


def _is_local(source: Any) -> bool:
    """Whether the value can be written back without communication; the same on every rank."""
    above = source.base._source
    return (source.kind != "moved" or source.func in COMPUTED) and (above is None or _is_local(above))
