"""Where torch keeps the strategies of products of matrices and of attention."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_ops._matrix_ops",
    "_addmm_like_strategy addmm_single_dim_strategy addmm_strategy baddbmm_single_dim_strategy "
    "baddbmm_strategy bmm_single_dim_strategy bmm_strategy constant_pad_nd_single_dim_strategy "
    "dot_strategy gen_single_dim_einsum_strategies grouped_mm_strategy _mm_like_strategy "
    "mm_single_dim_strategy mm_strategy _scaled_dot_product_cudnn_attention_backward_base_strategies "
    "_scaled_dot_product_cudnn_attention_base_strategies scaled_dot_product_cudnn_attention_strategy "
    "_scaled_dot_product_efficient_attention_backward_base_strategies "
    "scaled_dot_product_efficient_attention_backward_strategy "
    "_scaled_dot_product_efficient_attention_base_strategies "
    "scaled_dot_product_efficient_attention_strategy "
    "_scaled_dot_product_flash_attention_backward_base_strategies "
    "scaled_dot_product_flash_attention_backward_strategy "
    "_scaled_dot_product_flash_attention_base_strategies scaled_dot_product_flash_attention_strategy "
    "_scaled_mm_scale_placement scaled_mm_single_dim_strategy "
    "scaled_scaled_dot_product_cudnn_attention_backward_strategy transpose_strategy",
    why="Rules in `shardwise.rules` say which layouts an op allows; they are not built from strategies.",
    fix="shardwise.register_sharding(op) adds a rule.",
)
