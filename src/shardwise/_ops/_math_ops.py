"""Where torch keeps the strategies of reductions and norms."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._math_ops",
    "_adjust_group_norm_scalars ARGMAX_ARGMIN_OPS argmax_argmin_strategy AVG_POOL_OPS "
    "BATCH_NORM_3OUT_OPS BATCH_NORM_4OUT_OPS batch_norm_backward_strategy batch_norm_strategy "
    "common_reduction_strategy cummax_cummin_strategy dim_reduction_with_indices_strategy "
    "foreach_max_strategy foreach_norm_strategy foreach_powsum_strategy _get_ndim "
    "_get_norm_reduction_op get_placement_from_reduction_op global_median_strategy "
    "grid_sampler_backward_strategy grid_sampler_strategy group_norm_strategy histc_strategy "
    "_infer_reduce_dims_map _infer_reduction_dims interp_pool_1out_2in_strategy "
    "interp_upsample_1out_1in_strategy kthvalue_strategy layer_norm_bwd_single_dim_strategy "
    "layer_norm_single_dim_strategy _linalg_batch_dim_strategies linalg_batch_dim_strategy "
    "linalg_cross_strategy _LINALG_NUM_PLACEMENTS linalg_pinv_strategy linalg_replicate_strategy "
    "LINEAR_REDUCTION_OP_MAP linear_reduction_strategy logsumexp_strategy "
    "map_placements_after_reduction max_min_dim_single_dim_strategy MAX_POOL_OPS "
    "nll_loss_backward_strategy nll_loss_forward_strategy _NormPartial NormReduction "
    "pool_backward_strategy POOL_SPATIAL_RANK pooling_strategy powsum_strategy Reduction "
    "ReductionOpType _replicate_dims_start_at replicate_reduction_dims "
    "rms_norm_bwd_single_dim_strategy rms_norm_single_dim_strategy scan_strategy _skip_dim "
    "softmax_backward_strategy softmax_strategy sort_default_strategy sort_stable_strategy "
    "sort_strategy std_var_reduction_strategy topk_strategy vector_norm_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
