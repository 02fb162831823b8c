"""Where torch keeps redistribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._absent import absent
from shardwise.layout import Placement, Spec
from shardwise.plan.settings import forget_decisions
from shardwise.tensor.dtensor import DTensor

__all__ = [
    "Redistribute",
    "clear_redistribute_planner_cache",
    "disable_redistribute_transform_optimization",
    "redistribute_local_tensor",
    "use_min_cost_redistribution_plan",
]


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


@contextmanager
def disable_redistribute_transform_optimization() -> Iterator[None]:
    """Do nothing: collectives over several axes are one step of a plan, not a later optimization of it."""
    yield


clear_redistribute_planner_cache = forget_decisions


def redistribute_local_tensor(
    local_tensor: Tensor, current_spec: Spec, target_spec: Spec, *, async_op: bool = False, **_: object
) -> Tensor:
    """The block of a tensor after it moved from the layout of one spec to that of another, without a gradient."""
    with torch.no_grad():
        moved = DTensor(local_tensor, current_spec).redistribute(
            placements=target_spec.placements, async_op=async_op
        )
        return moved.to_local()


__getattr__ = absent(
    "_redistribute",
    "_BackwardDtypeConfig DTensorRedistributePlanner "
    "_DtypeConfig _FlattenedTransformInfo _gen_transform_infos "
    "_gen_transform_infos_non_cached _get_flattened_mesh_by_layout _get_flattened_mesh_by_layout_impl "
    "get_redistribute_planner NestedRedistribute _optimize_transform_infos "
    "_redistribute_backward _redistribute_cost_sort_key _TransformInfo "
    "_update_shard_order_and_placements _warn_flatten_optimization_not_possible",
    why="A redistribution is a search over layouts whose result is a `Plan`, not a list of changes of placements.",
    fix="shardwise.plan_redistribute(before, after) returns the plan, which can be printed and costed.",
)
