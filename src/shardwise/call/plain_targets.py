"""Plain tensors that an op on DTensors writes to: they are the same on every rank, and each rank writes to its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.call.fallback import replicated_like
from shardwise.call.resolve import tensors_in
from shardwise.comm import PerRank, members_of, spread
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sparse_tensor import made

__all__ = ["as_replicated", "plain_targets"]


def plain_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The plain tensors among what an op writes to, by its schema."""
    written = [
        args[i] if i < len(args) else kwargs.get(arg.name)
        for i, arg in enumerate(func._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]
    return [t for t in tensors_in(written) if not isinstance(t, DTensor)]


def as_replicated(
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an op with its plain targets as replicated DTensors, in whose place they are returned.

    Simulated ranks would all write to the one tensor there is, and add what they add several times.
    """
    first = next(t for t in tensors_in([*args, *kwargs.values()]) if isinstance(t, DTensor))
    mesh = first.device_mesh
    lifted: dict[int, DTensor] = {}
    for t in plain_targets(func, args, kwargs):
        # the first rank has the tensor itself, and so writes to it
        block = spread(t, list(members_of(mesh))) if isinstance(first._local_tensor, PerRank) else t
        lifted[id(t)] = made(block, replicated_like(t, mesh))
    plain = {id(lifted[id(t)]): t for t in plain_targets(func, args, kwargs)}
    result = run(func, _swapped(args, lifted), _swapped(kwargs, lifted))
    for d in lifted.values():
        if d.shape != plain[id(d)].shape:  # it took the shape of the result, in memory of its own
            whole = d.full_tensor()
            plain[id(d)].resize_(d.shape).copy_(whole.ranks[0] if isinstance(whole, PerRank) else whole)
    return _swapped(result, plain)


def _swapped(value: Any, by_id: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_swapped(v, by_id) for v in value)
    if isinstance(value, dict):
        return {k: _swapped(v, by_id) for k, v in value.items()}
    return value
