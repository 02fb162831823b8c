"""Plain tensors that an op on DTensors writes to: they are the same on every rank, and each rank writes to its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.call.arguments import replace_tensors
from shardwise.call.op_call import OpCall
from shardwise.comm import first_rank
from shardwise.tensor.construct import replicate
from shardwise.tensor.dtensor import DTensor

__all__ = ["plain_targets", "run_with_plain_targets"]


def plain_targets(call: OpCall) -> list[Tensor]:
    """The plain tensors among those that an op writes to, by its schema."""
    return [t for t in call.written if not isinstance(t, DTensor)] if call.info.writes else []


def run_with_plain_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op with its plain targets as replicated DTensors, and return the plain targets in their place.

    Simulated ranks would otherwise all write to the one tensor there is, and accumulate several times.
    """
    call = OpCall(func, args, kwargs)
    targets = plain_targets(call)
    # the first simulated rank has the tensor itself, and so writes to it
    wrapped = {id(t): replicate(t, call.mesh, simulated=call.simulated) for t in targets}
    result = func(*replace_tensors(args, wrapped), **replace_tensors(kwargs, wrapped))
    for t in targets:
        d = wrapped[id(t)]
        if d.shape != t.shape:  # it took the shape of the result, in other memory
            t.resize_(d.shape).copy_(first_rank(d._local_tensor))
    return replace_tensors(result, {id(wrapped[id(t)]): t for t in targets})
