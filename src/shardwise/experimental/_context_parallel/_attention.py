"""The names of torch's context parallelism."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise._absent import absent
from shardwise.experimental._context_parallel.sequences import (
    ContextParallelOptions as _ContextParallelOptions,
)
from shardwise.experimental._context_parallel.sequences import (
    RotateMethod as _RotateMethod,
)
from shardwise.experimental._context_parallel.sequences import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from shardwise.experimental._context_parallel.sequences import (
    context_parallel_shard as _context_parallel_shard,
)
from shardwise.experimental._context_parallel.sequences import (
    disable_dispatcher as _disable_context_parallel_dispatcher,
)
from shardwise.experimental._context_parallel.sequences import (
    enable_dispatcher as _enable_context_parallel_dispatcher,
)
from shardwise.experimental._context_parallel.sequences import (
    options as _cp_options,
)
from shardwise.experimental._context_parallel.style import ContextParallelStyle as _ContextParallel
from shardwise.experimental._context_parallel.token_order import HeadTailLoadBalancer as _HeadTailLoadBalancer
from shardwise.experimental._context_parallel.token_order import LoadBalancer as _LoadBalancer

__all__ = [
    "_ContextParallel",
    "_ContextParallelOptions",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "set_rotate_method",
]

_WHY = "Flex attention is not split along sequences, and there is no ring of blocks: keys and values are gathered."
_FIX = "F.scaled_dot_product_attention inside context_parallel, or on DTensors whose sequence dim is split"


def flex_cp_allgather(k: Any, v: Any, seq_dim: int, pg_name: str) -> NoReturn:
    """Refuse; torch's gathers keys and values for flex attention."""
    raise NotImplementedError(f"flex_cp_allgather is not supported.\n  why: {_WHY}\n  fix: {_FIX}")


__getattr__ = absent(
    "experimental._context_parallel._attention",
    "_AllGatherRotater _AllToAllRotater _AttentionOp _CausalBehavior _create_rotater _DispatchMode _RingRotater "
    "_scaled_dot_product_ring_cudnn_attention _scaled_dot_product_ring_efficient_attention "
    "_scaled_dot_product_ring_flash_attention _sdpa_handler _templated_ring_attention_backward "
    "_PTRRLoadBalancer _PerDocumentHeadTailLoadBalancer _SDPAMerger "
    "_context_parallel_buffers _create_cp_block_mask _is_causal_behavior _templated_ring_attention create_cp_block_mask",
    why=_WHY,
    fix=_FIX,
)
