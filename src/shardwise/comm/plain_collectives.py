"""Collectives of plain tensors in a simulation: every rank has the same tensor, so the result is computed from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.codec import reduce_all

__all__ = ["run_plain_collective"]


def run_plain_collective(name: str, group: Any, *args: Any) -> Any:
    """Run a collective of tensors that are the same on all ranks.

    Raises for one whose result differs between ranks, or that has another role for each rank.
    """
    run = _RUN.get(name)
    if run is None:
        raise RuntimeError(
            f"torch.distributed.{name} got plain tensors in a simulation.\n"
            "  why: A plain tensor is the same on all ranks, and each rank would receive or do something else.\n"
            "  fix: Pass tensors of shardwise.per_rank(lambda rank: ...), or run on real processes with shardwise.launch."
        )
    return run(dist.get_world_size(group), *args)


def _reduced(x: Tensor, op: str, size: int) -> Tensor:
    out = reduce_all([x] * size, "sum" if op == "avg" else op)
    return out / size if op == "avg" else out


def _all_reduce(size: int, tensors: Sequence[Tensor], op: str) -> None:
    for x in tensors:
        x.data.copy_(_reduced(x.data, op, size))


def _all_gather(size: int, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    for parts, x in zip(outputs, inputs, strict=True):
        for part in parts:
            part.data.copy_(x.data.view(part.shape))


def _all_gather_single(size: int, output: Tensor, x: Tensor) -> None:
    output.data.copy_(torch.cat([x.data.reshape(-1)] * size).view(output.shape))


_RUN: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_reduce": _all_reduce,
    "barrier": lambda size: None,
    "broadcast": lambda size, tensors: None,
    "functional.all_gather": lambda size, x: torch.cat([x] * size),
    "functional.all_reduce": lambda size, x, op: _reduced(x, op, size),
    "functional.broadcast": lambda size, x: x.clone(),
}
