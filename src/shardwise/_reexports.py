"""Names that torch's modules have because they import them from one another, which programs import from there as well."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["reexported", "reexports"]

_HOMES = {
    "": "DTensor DeviceMesh distribute_module distribute_tensor Partial Placement Replicate Shard",
    ".placement_types": "_is_shard_like _MaskPartial _StridedShard _StridedShardOffsetMode",
    "._dtensor_spec": "DTensorSpec ShardOrder ShardOrderEntry TensorMeta",
    "._op_schema": "ArgsType KwargsType OpInfo OpSchema OpSpec OpStrategy OutputSharding OutputSpecType PlacementList "
    "RuntimeSchemaInfo StrategyType TupleStrategy",
    "._collective_utils": "fill_empty_tensor_to_shards mesh_broadcast mesh_scatter MeshTopoInfo pad_tensor "
    "redistribute_cost shard_dim_alltoall unpad_tensor",
    "._utils": "assert_no_mixed_partial_types compute_global_tensor_info compute_local_shape_and_global_offset "
    "compute_local_stride "
    "ExplicitRedistributionContext normalize_to_torch_size try_find_mesh_from_args",
    "._random": "is_rng_supported_mesh",
    "._redistribute": "Redistribute redistribute_local_tensor",
    "._sharding_prop": "ShardingPropagator",
    "._decompositions": "DecompShardingStrategy",
    "._ops._einsum_strategy": "gen_einsum_strategies",
    "._ops._mask_buffer": "MaskBuffer",
    "._ops.single_dim_strategy": "_expand_single_dim_strategy_to_mesh register_single_dim_strategy _ShardingPlaceholder",
    "._ops.utils": "as_list expand_to_full_mesh_op_strategy generate_redistribute_costs infer_broadcast_dims_map "
    "is_tensor_dim_sharded is_tensor_evenly_shardable is_tensor_evenly_shardable_on_dim is_tensor_partial is_tensor_shardable "
    "map_placements_after_broadcast normalize_dim normalize_dims prod register_op_strategy "
    "shift_shard_dims_after_insert shift_shard_dims_after_remove",
    ".parallel.style": "ColwiseParallel ParallelStyle",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def reexported(module: str, name: str) -> Any:
    """A name in a module of ours whose counterpart in torch imports it.

    Args:
        module: the module that is asked for it, without the name of the package.
        name: the name.

    Raises:
        AttributeError: it is none of the names that torch's modules import from one another.

    >>> reexported("_ops.utils", "Replicate")
    <class 'shardwise.layout.placement.Replicate'>
    """
    home = _HOME_OF.get(name)
    if home is None or home == f".{module}":
        raise AttributeError(f"module 'shardwise.{module}' has no attribute {name!r}")
    return getattr(import_module(f"shardwise{home}"), name)


def reexports(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has such names, too."""
    return lambda name: reexported(module, name)
