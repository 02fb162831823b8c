"""Where torch keeps the strategies of ops that move elements."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._tensor_ops",
    "bucketize_single_dim_strategy cat_single_dim_strategy cat_strategy create_like_strategy "
    "_derive_follow_placements_from_tuple_strategy diagonal_scatter_single_dim_strategy "
    "equal_strategy eye_out_strategy fft_single_dim_strategy flip_single_dim_strategy gather_strategy "
    "gen_slice_scatter_strategy gen_slice_strategy gen_unbind_strategy _index_dim_strategy "
    "index_fill_scalar_single_dim_strategy index_fill_tensor_single_dim_strategy "
    "index_put_single_dim_strategy index_reduce_single_dim_strategy index_select_single_dim_strategy "
    "index_single_dim_strategy new_factory_strategy _partial_needs_reduce_for_dtype_cast "
    "_pass_through_partials propagate_single_input_strategy replica_only_strategy "
    "replicate_tensor_dim roll_single_dim_strategy scatter_add_strategy scatter_strategy "
    "select_backward_strategy select_int_strategy select_scatter_single_dim_strategy "
    "_shard_inactive_dims slice_backward_rules split_strategy stack_strategy "
    "_to_copy_single_dim_strategy unshard_tensor_dim",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
