"""Where torch keeps redistribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Placement
from shardwise.tensor.dtensor import DTensor

__all__ = ["Redistribute", "use_min_cost_redistribution_plan"]


class Redistribute:
    """`DTensor.redistribute`, called as torch's autograd function is."""

    @staticmethod
    def apply(
        input: DTensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same as `input.redistribute(device_mesh, placements, ...)`."""
        return input.redistribute(
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )


@contextmanager
def use_min_cost_redistribution_plan(enabled: bool = True) -> Iterator[None]:
    """Do nothing: plans are always the cheapest ones under the current cost model."""
    yield
