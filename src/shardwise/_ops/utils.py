"""Questions about dims and specs, under torch's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardwise._absent import absent
from shardwise.layout import Spec

__all__ = [
    "is_tensor_dim_sharded",
    "is_tensor_evenly_shardable",
    "is_tensor_evenly_shardable_on_dim",
    "is_tensor_partial",
    "is_tensor_shardable",
    "normalize_dim",
    "normalize_dims",
    "prod",
]


def normalize_dim(dim: int, ndim: int) -> int:
    """A dim as a number from 0 on.

    >>> normalize_dim(-1, 3)
    2
    """
    return dim if dim >= 0 else dim + ndim


def normalize_dims(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims as numbers from 0 on."""
    return tuple(normalize_dim(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims))


def prod(xs: Iterable[int]) -> int:
    """The product of some numbers."""
    return math.prod(xs)


def is_tensor_partial(spec: Spec) -> bool:
    """Whether a reduction is pending on an axis."""
    return any(p.is_partial() for p in spec.placements)


def is_tensor_dim_sharded(spec: Spec, dim: int) -> bool:
    """Whether an axis splits the dim."""
    return any(p.is_shard(dim) for p in spec.placements)


def is_tensor_shardable(shape: Sequence[int], spec: Spec) -> bool:
    """Whether each dim of the shape has at least as many elements as it has blocks."""
    return all(size >= parts for size, parts in zip(shape, spec.num_shards_map, strict=True))


def is_tensor_evenly_shardable(shape: Sequence[int], spec: Spec) -> bool:
    """Whether each dim of the shape is a multiple of the number of its blocks."""
    return all(size % parts == 0 for size, parts in zip(shape, spec.num_shards_map, strict=True))


def is_tensor_evenly_shardable_on_dim(shape: Sequence[int], spec: Spec, dim: int) -> bool:
    """Whether a dim of the shape is a multiple of the number of its blocks."""
    dim = normalize_dim(dim, len(shape))
    return shape[dim] % spec.num_shards_map[dim] == 0


__getattr__ = absent(
    "_ops.utils",
    "as_list expand_to_full_mesh_op_strategy generate_redistribute_costs _get_registration_wrapper "
    "infer_broadcast_dims_map map_placements_after_broadcast _OpSchemaT register_op_strategy "
    "register_prop_rule replicate_op_strategy _ShardingStrategyFunc shift_shard_dims_after_insert "
    "shift_shard_dims_after_remove _StrategyTypeT",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
