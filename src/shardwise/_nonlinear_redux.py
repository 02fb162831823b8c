"""Where torch keeps argmax and argmin along split dims."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_nonlinear_redux",
    "_ARGMINMAX_REDUCTION_OPS _collect_shard_mesh_dims _convert_to_global_idxs _gather_tensors "
    "_get_expected_shape _get_output_sharding _prep_arguments argminmax_handler "
    "minmax_dim_handler",
    why="They are programs of `shardwise.alternatives`, chosen by their cost.",
    fix="Call torch.argmax or torch.argmin on DTensors.",
)
