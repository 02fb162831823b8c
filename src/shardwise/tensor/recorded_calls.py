"""Calls in a graph that `make_fx` records of DTensors: what is no op of theirs is recorded as a call.

A graph of DTensors has no nodes for their blocks. What computes with blocks outside of ops would become a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import PerRank
from shardwise.layout import Layout, UnitPlacements
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_internals.tracing import is_recorded_block, proxy_mode, record_call

__all__ = ["record_local", "record_move", "recorder_of"]


def recorder_of(x: DTensor) -> Any:
    """The mode that records a graph which has this DTensor as a whole, and not its block; None if there is none."""
    mode = proxy_mode()
    if mode is None or not is_recorded_block(mode, x) or is_recorded_block(mode, x._local_tensor):
        return None
    return mode


@dataclass(frozen=True)
class _Redistribute:
    """A redistribution to a layout, as the target of a call in a graph."""

    run: Callable[..., DTensor]
    target: Layout
    units: UnitPlacements
    dtype: torch.dtype
    __name__ = "redistribute"

    def __call__(self, x: DTensor) -> DTensor:
        return self.run(x, self.target, self.units, False, self.dtype)


def record_move(
    mode: Any,
    run: Callable[..., DTensor],
    x: DTensor,
    target: Layout,
    units: UnitPlacements,
    dtype: torch.dtype,
) -> DTensor:
    """Record a redistribution that `run` does."""
    return record_call(mode, _Redistribute(run, target, units, dtype), x)  # type: ignore[no-any-return]


def record_local(mode: Any, x: DTensor) -> Any:
    """Record a `to_local`.

    Raises:
        RuntimeError: the block has a gradient, or there is one for each rank.
    """
    local = x._local_tensor
    if isinstance(local, PerRank) or (torch.is_grad_enabled() and x.requires_grad):
        raise RuntimeError(
            f"to_local of the DTensor {x._spec} was called while make_fx records a graph that has it as a whole.\n"
            "  why: The graph has no nodes for blocks, so that what is computed of this one would be a constant in it.\n"
            "  fix: make_fx(lambda block: f(DTensor.from_local(block, mesh, placements)))(x.to_local())"
        )
    return record_call(mode, _block, x)


def _block(x: DTensor) -> Any:
    return x._local_tensor.detach()


_block.__name__ = "to_local"
