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
from shardwise.comm import map_ranks
from shardwise.plan.settings import override_settings
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.implicit import announce

__all__ = ["announce_write", "overlaps_itself", "run_on_memory"]


def overlaps_itself(view: DTensor) -> bool:
    """Whether an op on a view must run on the memory of its base, because the view has elements of it more than once.

    Not where the view is written by an op that runs in the place of another one, which writes back; an expanded view is handled
    where its route is chosen, and torch's kernels do not read lazy bits there.
    """
    source = view._source
    if source is None or source.is_held or not may_overlap(view.shape, view.stride()):
        return False
    return not is_repeated(view) and not any(source.lazy_bits())


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
            views = {**full, id(target): view}
            map_ranks(func, *replace_tensors(call.args, views), **replace_tensors(call.kwargs, views))

        source.write_as(write)
    return target if call.info.returns else None


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
